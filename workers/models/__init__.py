"""Hugging Face models, and token tables as padded tensors."""
