"""Training ranks on DeepSpeed, and their checkpoints."""
