"""FedGen: a generator of features that the server trains and the clients use.

The package contains the client's trainer and the server's aggregator with its
generator.
"""
