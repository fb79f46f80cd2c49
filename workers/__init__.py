"""The workers: rollout engine, trainers, scorers and reward functions. Nothing here imports `orchestrator`."""
