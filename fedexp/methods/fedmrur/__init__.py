"""FedMRUR: the trainer with its hyperbolic regularizer, the Lorentz model, and the normalized mean of updates."""
