"""Displays of a run: loggers, progress, pictures and printed tables.

They only show results. The results themselves are the files of the run folder. Reports
that compare runs with the tables of papers are in `fedexp.tables.report`.
"""
