"""The engine: measure, limit, respond, scale, record."""
