"""The contracts: values, plug-in interfaces, the step kernel and the runner.

This package imports nothing of the rest of fedexp. Plug-ins derive from its classes,
and engines and the runner know plug-ins only through them.
"""
