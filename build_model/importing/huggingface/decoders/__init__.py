"""Kinds of decoder-only model types."""
