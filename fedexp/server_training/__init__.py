"""Training on the server: optimizers, batches and gradients.

Methods that train a network on the server between or after the rounds use this package.
Each step of a method's state machine is one epoch. The method's state contains the
parameters and the optimizer's state, so a resumed run produces bit-identical results.

The package is not for server optimizers: a `ServerOptimizer` applies the clients'
averaged update.
"""
