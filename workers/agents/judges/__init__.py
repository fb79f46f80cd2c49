"""Rewards that a language model gives: by the role `judge` or by an endpoint."""
