"""Configs: their own typed keys, and their composition from YAML files and overrides.

Hydra composes configs in this package only. Plug-ins are built from config nodes by
`fedexp.core.build`, not here.
"""
