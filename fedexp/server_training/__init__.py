"""Training on the server as a value: optimizers, batches and gradients of methods that learn there between or after rounds.

A method takes one epoch a step of its state machine and keeps parameters and optimizer state in its state, so that a resumed
run goes on with the same bits. (A `fedexp.server_optimizers` plug-in applies the clients' averaged update instead.)
"""
