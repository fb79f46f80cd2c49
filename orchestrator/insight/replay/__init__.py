"""Repeating a run's updates: what a step keeps, and how it is repeated and compared."""
