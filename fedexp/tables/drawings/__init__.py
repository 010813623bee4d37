"""Figures of papers, made from the runs of a table.

Each figure is a `fedexp.tables.drawing.Drawing`.
"""
