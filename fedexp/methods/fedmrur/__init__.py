"""FedMRUR: the trainer with its hyperbolic regulariser, and the normalised mean.

The regulariser uses the Lorentz model. The mean is that of the clients' updates.
"""
