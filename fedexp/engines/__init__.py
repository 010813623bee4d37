"""Engines: how client jobs are executed.

Jobs run one after the other, stacked, in worker processes or on Ray. The package also
has the wrappers that take client models from the client cache or from a folder. Methods
and runs do not belong here.
"""
