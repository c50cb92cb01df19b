"""A static site that runs a bundle in the browser."""
