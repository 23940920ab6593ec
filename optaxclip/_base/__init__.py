"""Foundations of all other packages: types, numerics, trees, states, and checks."""
