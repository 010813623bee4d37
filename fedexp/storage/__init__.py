"""The files of runs: run folders, checkpoints, stored models and the tensor store.

The identity of a run, which names its folder, is computed here too. The code that
executes runs and decides what to store is in `fedexp.running`.
"""
