"""The scorer of an audit: plain float32 transformers, in a separate process."""
