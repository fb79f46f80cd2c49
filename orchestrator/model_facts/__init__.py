"""Facts about models from their folders: sizes, shapes, completeness. Loads nothing."""
