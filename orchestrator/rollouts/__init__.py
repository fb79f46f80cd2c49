"""From prompts to scored groups: scheduler, engine pool, scoring, evaluation, weight sync."""
