"""Partition schemes, one per file.

Each scheme is a `fedexp.data.partition.Partitioner` that a YAML file in
`conf/partition` names. Base classes and helpers of several schemes are here too. The
rules that every partition obeys are in `fedexp.data.partition`.
"""
