"""Measures the overhead of clipping on this machine."""
