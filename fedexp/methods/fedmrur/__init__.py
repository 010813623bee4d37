"""FedMRUR: a hyperbolic regulariser and normalised aggregation.

The package has the trainer with its regulariser, the Lorentz model of hyperbolic space,
and the normalised mean of updates. The trainer derives from `LocalMoFedSAM`, which has
the ascent of `FedSAM` and the momentum of `FedCM`.
"""
