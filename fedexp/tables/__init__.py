"""Tables of papers: their definition, jobs, records, verdicts and claims.

A table is read from `conf/table` and is never part of a run's config. The forms of its
report are in `fedexp.tables.report`, figures of papers in `fedexp.tables.drawings`.
"""
