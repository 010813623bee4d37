"""The base classes and helpers that several methods share.

Base classes and helpers are not methods themselves, and no config selects them. Code
that only one method uses belongs to that method.
"""
