"""A table's report, and every form in which it is shown."""
