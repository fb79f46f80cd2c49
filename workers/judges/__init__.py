"""Judges: language models that score responses by a rubric."""
