"""Data of a run: prompts, examples, texts."""
