"""Distillation of an ensemble on the server.

It contains the losses and, for distillation without data, the teachers, the generated
images, their bank and the student. Images have values in [0, 1] wherever they are
generated or stored. Every network sees them normalised as the clients' images are.
"""
