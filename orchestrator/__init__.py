"""Decisions: the spec, the one loop, the ledger, the placement. Nothing here touches a model."""
