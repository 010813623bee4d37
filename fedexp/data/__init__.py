"""Data sets, partition schemes, and the steps from both to the data of a run.

A `Dataset` declares and reads a data set. A `Partitioner` assigns its samples to
clients. `fedexp.data.federated` combines the two. Partition schemes are in
`fedexp.data.partitions`. The value types that training uses (`Samples`,
`FederatedData`) are in `fedexp.core.data`. Training code does not belong here.
"""
