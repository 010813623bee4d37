"""Federated methods, one entry per method that has code of its own.

A method with one part is a file, a method with several parts is a folder. Config groups
(``trainer``, ``aggregator``, ``server_optimizer``) select the classes. The base classes
of several methods are in `fedexp.methods.bases`.
"""
