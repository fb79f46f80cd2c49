"""From text to tokens, and trained samples as Parquet."""
