"""Facts about models from their folders: sizes, shapes, completeness. Nothing is loaded."""
