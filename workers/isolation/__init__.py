"""Bounds on processes that run user code: their output, their environment and their descendants."""
