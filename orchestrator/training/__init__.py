"""Turns batches into updates: micro-batches, ledger, state, checkpoints, and the records of steps for a replay."""
