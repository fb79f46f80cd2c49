"""`troupe doctor`: whether this machine can run Troupe, and what to do if it cannot."""
