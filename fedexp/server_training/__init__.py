"""Training on the server: optimizers, batches and gradients.

Methods that train a network on the server between or after the rounds use this package.
One step of such a method is an epoch or a stage of several optimizer steps. Its state
contains the network's parameters and the optimizer's state, so a resumed run produces
bit-identical results.

The optimizers here compute steps from gradients on the server's data. They are not
server optimizers. A `ServerOptimizer` applies the clients' averaged update.
"""
