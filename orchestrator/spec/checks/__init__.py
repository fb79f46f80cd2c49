"""Checks that refuse a spec: combinations of fields, and what a machine does not have."""
