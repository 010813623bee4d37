"""Loggers, progress, pictures and tables: everything that shows a run.

The files of the run folder remain the record of the run.
"""
