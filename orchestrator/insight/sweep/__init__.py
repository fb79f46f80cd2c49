"""Sweeps: many runs of one spec with other values, and what they show."""
