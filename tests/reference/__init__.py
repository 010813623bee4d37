"""Small plug-ins, each of which needs one of the contracts. No part of the package, and
of no config group.
"""
