"""Distillation of an ensemble on the server.

The package contains the losses of distillation. For distillation without data it also
contains the teachers, the generated images, the bank that stores them, and the student.
Generated images have values in [0, 1]. The bank stores them in 8 bits per value. Every
network receives them normalised in the same way as the clients' images.
"""
