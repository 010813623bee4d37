"""FedMRUR: a hyperbolic regulariser and normalised aggregation.

The package contains the trainer with its regulariser, the Lorentz model of hyperbolic
space, and the normalised mean of updates. The trainer derives from `LocalMoFedSAM`,
which has the perturbation of `FedSAM` and the momentum of `FedCM`.
"""
