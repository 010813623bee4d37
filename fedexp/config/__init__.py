"""The experiment's own keys, and the composition of a config from YAML and overrides.

The YAML files are in `conf`. Objects are built from a config in
`fedexp.running.experiment`.
"""
