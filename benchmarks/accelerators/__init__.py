"""Counts the overhead of clipping in programs compiled for accelerators."""
