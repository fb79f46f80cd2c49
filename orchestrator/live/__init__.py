"""Changes to an active run: commands that reach it, scaling of its workers, and the differences between two specs."""
