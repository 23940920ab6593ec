"""Which method helps? Every method on several tasks, with faults injected: see `__main__`."""
