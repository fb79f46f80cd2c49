"""User code that the shipped specs name."""
