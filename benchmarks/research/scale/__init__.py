"""Repeats the study with networks of 30 to 100 times the size."""
