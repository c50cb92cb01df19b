"""The tasks of an engine: a module for each."""
