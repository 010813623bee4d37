"""Tasks: the loss of a batch, predictions, ensembles and metrics.

A task implements `fedexp.core.task.Task`. A YAML file in `conf/task` names its class.
Networks are in `fedexp.models`. The code that evaluates models on a data set is in
`fedexp.evaluation`.
"""
