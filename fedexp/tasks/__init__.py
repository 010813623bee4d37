"""Tasks: the loss of a batch, predictions, ensembles and metrics.

A task implements `fedexp.core.task.Task`. A YAML file in `conf/task` names its class.
Networks are in `fedexp.models`, and the loops that evaluate are in `fedexp.evaluation`.
"""
