"""Training on the server as a value: optimizers, batches and gradients.

Methods use it to train between or after rounds. A method takes one epoch per step of
its state machine. It stores parameters and optimizer state in its state, so that a
resumed run continues bit-exactly. (A `fedexp.server_optimizers` plug-in applies the
clients' averaged update instead.)
"""
