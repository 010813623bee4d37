"""Tables of papers: their definition, jobs, records, verdicts and claims.

Each table is read from `conf/table` and is never part of a run's config. The formats of
its report are in `fedexp.tables.report`. The figures of papers are in
`fedexp.tables.drawings`.
"""
