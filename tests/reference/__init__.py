"""Small plug-ins, each of which needs one of the contracts.

They are no part of the package and of no config group.
"""
