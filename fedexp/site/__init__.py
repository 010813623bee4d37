"""The web site of fedexp: results and documentation as static pages.

This package generates the pages as Markdown and calls mkdocs-material, which turns them
into HTML. The modules that execute a run do not import it.
"""
