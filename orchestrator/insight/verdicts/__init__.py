"""Verdicts on a run: what is wrong, since which step, the evidence, and what to change."""
