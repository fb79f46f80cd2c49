"""Verdicts on a run: what is wrong, since which step, by which evidence, and what to change."""
