"""Reward functions and the processes they run in."""
