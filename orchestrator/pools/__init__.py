"""Replicas of roles: started, given work, replaced when they are lost, added and removed while a run is active."""
