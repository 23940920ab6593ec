"""Whole runs compared: which method, guard or optimizer helps."""
