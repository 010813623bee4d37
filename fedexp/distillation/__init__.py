"""Distillation of an ensemble on the server, without data: teachers, losses, generated images, their bank, the student.

Images have values in [0, 1] wherever they are generated or stored; every network sees them normalised as the clients' are.
"""
