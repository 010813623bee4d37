"""FedGen: the client's trainer and the server's aggregator with its generator."""
