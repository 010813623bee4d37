"""FedMRUR: the trainer, the Lorentz model and the normalised mean of updates."""
