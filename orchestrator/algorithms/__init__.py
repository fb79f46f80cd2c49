"""The table of algorithms, and the spec's section `algorithm`."""
