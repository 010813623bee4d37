"""The site: results and documentation as static pages.

This package generates the pages and calls mkdocs-material. The modules that execute a
run do not import it.
"""
