"""Compares methods, safeguards and optimizers in complete runs."""
