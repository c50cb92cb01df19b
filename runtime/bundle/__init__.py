"""The format of a bundle."""
