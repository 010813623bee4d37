"""Figures of papers, made from the runs of a table: each a `fedexp.tables.drawing.Drawing`."""
