"""The keys that are not groups, and composing a config from YAML and overrides.

The YAML files are in `conf`. Objects are built from a config in
`fedexp.running.experiment`.
"""
