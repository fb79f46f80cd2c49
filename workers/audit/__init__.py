"""The judge of an audit: plain float32 transformers, in a process of its own."""
