"""Checks of a bundle: each compares one property with the checkpoint."""
