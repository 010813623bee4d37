"""Evaluation of the models that a method delivers.

The models are evaluated on test, validation and training data: on whole splits, single
classes and single clients. The intermediate models of a round are evaluated here, too.
The metrics of a batch are defined in `fedexp.tasks`. Tables and reports of finished
runs are in `fedexp.tables`.
"""
