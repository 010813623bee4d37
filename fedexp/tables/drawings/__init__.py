"""Figures of papers, drawn from the runs of a table.

Each is a `fedexp.tables.drawing.Drawing` that a table's YAML names. The pictures that
every report has are in `fedexp.tables.report.pictures`.
"""
