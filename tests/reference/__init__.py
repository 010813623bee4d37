"""Small plug-ins, each of which needs one of the plug-in contracts.

They are not part of the package, and no config group contains them.
"""
