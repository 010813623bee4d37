"""Displays of a run: loggers, progress, pictures and tables.

The run folder's files stay the truth. Reports of tables are in `fedexp.tables.report`.
"""
