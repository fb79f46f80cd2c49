"""Repeating a run's updates: which of the kept steps, how they are repeated, and how the results are compared."""
