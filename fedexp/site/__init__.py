"""The site: results and documentation as static pages.

Generators write Markdown pages from the sources, the config folders and committed
records, and mkdocs-material builds them. Reports of tables are made in
`fedexp.tables.report`.
"""
