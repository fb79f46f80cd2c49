"""Processes of a run on this node, inspected from outside: states, stack dumps, GPUs, disks."""
