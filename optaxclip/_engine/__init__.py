"""The engine: measure, threshold, respond, scale, record."""
