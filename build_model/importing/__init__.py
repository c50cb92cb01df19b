"""Checkpoints of other libraries, read into the reference model."""
