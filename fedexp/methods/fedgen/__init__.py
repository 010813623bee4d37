"""FedGen: a generator of features that the server trains and the clients use.

The features are inputs of the network's head. The package contains the client's trainer
and the server's aggregator with its generator.
"""
