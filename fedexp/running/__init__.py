"""The life of a run, from a resolved config to a stored result.

Checks, execution, costs and summaries belong here. Training loops are in `fedexp.core`,
files of runs in `fedexp.storage`.
"""
