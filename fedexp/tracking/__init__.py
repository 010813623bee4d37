"""Displays of a run: loggers, progress, pictures and tables.

The files of the run folder remain the authoritative results. Reports of tables are in
`fedexp.tables.report`.
"""
