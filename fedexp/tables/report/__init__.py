"""The report of a table, and every format in which it is shown."""
