"""All models for the tests of per-example norms: a small loss of one example for each, by name."""

import ghost_layers
import ghost_libraries
import ghost_networks
from ghost_table import MODELS, QUICK, Model

__all__ = ["MODELS", "QUICK", "Model"]
FILES = (ghost_layers, ghost_networks, ghost_libraries)  # each adds its models to the table
