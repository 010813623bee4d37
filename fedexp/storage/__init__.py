"""Files of a run: its folder, checkpoints, stored models and identity.

The package also finds stored runs and selects among them. Training and evaluation do
not belong here.
"""
