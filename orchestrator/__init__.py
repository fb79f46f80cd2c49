"""The controller and its services: spec, data, scheduling, training loop, ledger, checkpoints. Loads no model."""
