"""Compute: the rollout engine, the trainers, the scorers. Nothing here knows of ``orchestrator``."""
