"""Distillation of an ensemble on the server: losses; without data: teachers, generated images, their bank, the student.

Images have values in [0, 1] wherever they are generated or stored; every network sees them normalised as the clients' are.
"""
