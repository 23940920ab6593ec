"""Compares candidates for the recommendation in the README, as defined in `../recommended.md`."""
