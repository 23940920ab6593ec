"""The named transformations."""
