"""The contracts: values, plug-in interfaces, the step kernel and the runner.

It imports nothing from the other packages of fedexp. Implementations of the interfaces
belong to those packages.
"""
