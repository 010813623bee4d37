"""Engines, which execute the client jobs of a round.

They run jobs serially, stacked (several clients as one batched computation), in worker
processes or on a Ray cluster. All engines implement `fedexp.core.engine.Engine`. This
package also contains the cache of client results, the use of stored models and the
choice of an engine. No module here depends on a method.
"""
