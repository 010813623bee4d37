"""A table's report as a value, and every form in which it is shown.

The forms are Markdown, CSV, LaTeX, HTML, the terminal, pictures and W&B. The numbers
and verdicts in the report are computed in `fedexp.tables`.
"""
