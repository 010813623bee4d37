"""Federated methods, one entry per method that has its own code.

A method with one part is a file, a method with several parts is a folder. The config
groups ``trainer``, ``aggregator`` and ``server_optimizer`` select the classes. Code
that several methods derive from is in `fedexp.methods.bases`.
"""
