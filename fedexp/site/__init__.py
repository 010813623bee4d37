"""The site: results and documentation as static pages."""
