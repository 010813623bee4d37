"""The site: results and documentation as static pages.

It contains generators of pages and the call of mkdocs-material. The modules that
execute a run do not import it.
"""
