"""Commands of `troupe`, a module for each group of related ones. Each parses its flags, calls the module that
does the work, and prints the result."""
