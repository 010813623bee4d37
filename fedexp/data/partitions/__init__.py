"""Partition schemes, one per file.

Each is a `fedexp.data.partition.Partitioner` that a YAML of `conf/partition` names.
Base classes and helpers that several schemes share are here too. The rules that every
partition obeys are in `fedexp.data.partition`.
"""
