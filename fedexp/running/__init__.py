"""The life of a run: from a resolved config to a stored result.

It builds and checks the experiment, executes its rounds, and records steps, costs and
summary. The rounds themselves are defined in `fedexp.core.runner`. The files of a run
are defined in `fedexp.storage`.
"""
