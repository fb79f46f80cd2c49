"""Advantages, losses and objectives as pure functions."""
