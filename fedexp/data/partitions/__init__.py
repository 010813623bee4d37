"""Partition schemes, one per file.

Each scheme is a subclass of `fedexp.data.partition.Partitioner`, and a YAML file in
`conf/partition` names this class. Base classes and helpers that several schemes share
are here too. The rules that every partition obeys are in `fedexp.data.partition`.
"""
