"""The federated methods, one entry per method that has its own code.

An entry is a file, or a folder if the method needs several files. The config groups
``trainer``, ``aggregator`` and ``server_optimizer`` select the classes. Code that
several methods derive from is in `fedexp.methods.bases`.
"""
