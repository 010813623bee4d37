"""Training on the server: optimizers, batches and gradients.

Methods that train on the server between or after the rounds use it. A method takes one
epoch per step of its state machine. Its state contains the parameters and the
optimizer's state, so a resumed run produces bit-identical results. A `ServerOptimizer`
applies the clients' averaged update instead.
"""
