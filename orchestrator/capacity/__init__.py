"""What a spec needs before it runs: model sizes, memory, and whether it fits."""
