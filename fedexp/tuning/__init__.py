"""Tuning of hyper-parameters on held-out data.

This package has the ranges of a search, the number by which points are compared, the
study with its trials, and the files of ``conf/tuned``. It starts no run:
``fedexp.commands`` passes a function that launches jobs. Optuna is imported only when
a study is opened.
"""
