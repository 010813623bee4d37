"""FedGen: a generator of features that the server learns and the clients use.

The package has the client's trainer and the server's aggregator with its generator.
"""
