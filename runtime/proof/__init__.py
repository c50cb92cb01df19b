"""Comparison of two computations of one model, reports of it, and certificates."""
