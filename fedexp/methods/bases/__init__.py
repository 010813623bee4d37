"""Base classes and helpers that several methods share.

No paper calls any of them a method, and no config selects them. Code that only one
method uses belongs to that method.
"""
