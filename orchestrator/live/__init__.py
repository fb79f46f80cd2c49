"""Changes to an active run: commands that reach it, scaling of its workers, and what differs between two specs."""
