"""Tables of papers: their definition, jobs, records, verdicts and claims.

Tables are read from `conf/table` and are never part of a run's config. The output
formats of their reports are in `fedexp.tables.report`. The code that draws the papers'
figures is in `fedexp.tables.drawings`.
"""
