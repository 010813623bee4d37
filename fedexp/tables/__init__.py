"""Reproduction of the result tables of papers.

This package reads the definition of a table and lists the runs that it needs. It then
compares the numbers of these runs with the numbers and claims of the paper. Tables are
read from `conf/table` and are never part of a run's config. The output formats of the
reports are in `fedexp.tables.report`. The code that draws the papers' figures is in
`fedexp.tables.drawings`.
"""
