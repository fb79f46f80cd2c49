"""Commands of `troupe`, a module each for those that belong together. Each parses its flags, calls the module that
does the work, and prints the result."""
