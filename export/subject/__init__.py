"""Models under proof: a bundle, the graphs of another tool, a torch module."""
