"""What the engine does with rows: a module for each task."""
