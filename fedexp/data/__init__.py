"""Data sets, partition schemes, and the code that builds a run's data from them.

A `Dataset` declares and reads a data set. A `Partitioner` assigns its samples to
clients. `fedexp.data.federated` combines the two. Partition schemes are in
`fedexp.data.partitions`. The value types that training uses (`Samples`,
`FederatedData`) are in `fedexp.core.data`. Training code does not belong here.
"""
