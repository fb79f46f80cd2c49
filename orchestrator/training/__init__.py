"""From batches to updates: micro-batches, ledger, state, checkpoints, and what a step keeps for a replay."""
