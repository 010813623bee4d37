"""Evaluation of a method's outcome on test, validation and training data.

It covers whole splits, single classes and clients, and traces within a round. The
metrics of a batch are defined in `fedexp.tasks`. Tables and reports of finished runs
are in `fedexp.tables`.
"""
