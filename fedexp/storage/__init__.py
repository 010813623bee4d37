"""The files of runs: run folders, checkpoints, stored models and the tensor store.

This package also computes the identity of a run, which determines the name of its
folder. The code that executes runs and decides what to store is in `fedexp.running`.
"""
