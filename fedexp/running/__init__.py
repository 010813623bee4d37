"""The execution of a run, from a resolved config to a stored result.

The modules build and check the experiment, execute its rounds, and record its steps,
its costs and its summary. The rounds themselves are defined in `fedexp.core.runner`.
The files of a run are defined in `fedexp.storage`.
"""
