"""Models from their folders: sizes, shapes and whether their files are complete. Nothing is loaded."""
