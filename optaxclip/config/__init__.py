"""Transformations from plain data, as YAML, TOML, JSON and `ml_collections` hold it."""

from optaxclip.config.building import from_config as from_config
