"""What a spec needs before it runs: memory of its workers, their places, and whether they fit."""
