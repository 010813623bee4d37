"""The experiment's own keys, and how a config is composed from YAML and overrides."""
