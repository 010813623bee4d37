"""Distillation of an ensemble on the server.

The package contains the losses and, for distillation without data, the teachers, the
generated images, their bank and the student. Generated images have values in [0, 1].
The bank stores them in 8 bits. Every network receives them normalised in the same way
as the clients' images.
"""
