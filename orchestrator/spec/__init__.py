"""The YAML spec: sections, cross-checks, errors with file and line, chains of stages."""
