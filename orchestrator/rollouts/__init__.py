"""Turns prompts into scored groups: scheduler, engine pool, scoring, evaluation, weight sync."""
