"""Displays of a run: loggers, progress, pictures and tables.

They only show results. The results themselves are the files of the run folder. Reports
of tables are in `fedexp.tables.report`.
"""
