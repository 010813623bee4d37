"""Data sets and partition schemes, and how both become the data of a run.

A `Dataset` declares and reads a data set, a `Partitioner` assigns its samples to
clients, and `fedexp.data.federated` combines them. Partition schemes are in
`fedexp.data.partitions`. The value types that training sees (`Samples`,
`FederatedData`) are in `fedexp.core.data`, and training code does not belong here.
"""
