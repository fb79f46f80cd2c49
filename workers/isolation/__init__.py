"""Bounds on processes of user code: output, environment and descendants. Files that end with their process."""
