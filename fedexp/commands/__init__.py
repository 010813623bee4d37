"""The commands ``fedexp``, ``fedexp-data``, ``fedexp-runs``, ``-table`` and ``-tune``.

They parse arguments, call the other packages and print. No other package imports them.
"""
