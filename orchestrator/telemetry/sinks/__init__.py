"""Destinations of a run's metrics, a module each."""
