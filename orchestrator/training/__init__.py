"""From batches to updates: micro-batches, ledger, state, checkpoints."""
