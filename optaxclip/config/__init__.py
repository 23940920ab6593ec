"""Transformations from plain data, such as YAML, TOML, JSON and `ml_collections` hold."""

from optaxclip.config.building import from_config as from_config
