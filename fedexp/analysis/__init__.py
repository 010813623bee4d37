"""Comparison of stored runs: data frames, pictures, and statistics over rows and seeds.

This package reads the folders of runs and groups the runs by keys of their configs. It
trains nothing. The tables of papers are in `fedexp.tables`.
"""
