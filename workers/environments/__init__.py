"""Environments and tools: what the policy acts in over several turns."""
