"""Engines, which execute the client jobs of a round.

They run jobs serially, stacked, in worker processes or on a Ray cluster. All implement
`fedexp.core.engine.Engine`. The cache of client results, the use of stored models and
the choice of an engine are here too. No module here depends on a method.
"""
