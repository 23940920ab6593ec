"""Compares all methods on several tasks with injected faults; see `__main__`."""
