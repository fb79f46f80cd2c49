"""Commands of `troupe`, a module for each group: each parses flags, calls what does the work, and prints the result."""
