"""Composition of a config from YAML files and overrides.

The types of the config keys that do not belong to a config group are here, too. The
YAML files are in `conf`. `fedexp.running.experiment` builds objects from a config.
"""
