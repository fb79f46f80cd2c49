"""Judges: language models that score responses, or compare them."""
