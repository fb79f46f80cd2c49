"""Reinforcement learning for language models on Ray.

What users import in their own code is in `troupe.environments`, `troupe.rewards`, `troupe.algorithms` and
`troupe.sandbox`. The folders `orchestrator/`, `workers/` and `deploy/` of a checkout are linked into this package; a
wheel contains them here.
"""
