"""Imports that the workers of a run on one machine share: a process that has made them forks each worker."""
