"""The pairs of features that a run can have: which features there are, and the runs in which every pair occurs."""
