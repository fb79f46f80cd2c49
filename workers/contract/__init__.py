"""Configuration, messages and Arrow tables shared by the workers and the orchestrator."""
