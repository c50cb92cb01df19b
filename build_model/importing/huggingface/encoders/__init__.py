"""Encoder-only model types with parts of their own."""
