"""The command lines ``fedexp``, ``fedexp-data``, ``fedexp-runs`` and ``fedexp-table``.

They parse arguments, call the other packages and print. No other package imports them.
"""
