"""The vLLM engine: its process and its settings."""
