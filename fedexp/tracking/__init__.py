"""Loggers, progress, pictures and tables: everything that shows a run. The run folder's files stay the truth."""
