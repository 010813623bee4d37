"""The site: results and documentation as static pages.

It contains generators of pages and the call of mkdocs-material. No module that a run
uses imports it.
"""
