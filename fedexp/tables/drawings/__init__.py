"""Figures of papers, made from the runs of a table.

Each is a `fedexp.tables.drawing.Drawing`.
"""
