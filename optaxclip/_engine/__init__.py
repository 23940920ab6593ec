"""The engine: measures norms, and computes thresholds, multipliers and records."""
