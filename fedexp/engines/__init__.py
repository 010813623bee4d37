"""Engines: they execute the client jobs of a round.

They run jobs serially, stacked, in worker processes or on a Ray cluster, and all
implement `fedexp.core.engine.Engine`. The stored results of client jobs and the choice
of an engine are here too. Nothing here knows a method.
"""
