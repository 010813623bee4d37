"""Tasks: the loss of a batch, predictions, ensembles and metrics.

A task implements `fedexp.core.task.Task` and is named by a YAML of `conf/task`.
Networks are in `fedexp.models`, and the loops that evaluate are in `fedexp.evaluation`.
"""
