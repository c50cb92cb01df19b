"""Torch and its float64 oracle beside a bundle: cases, judgement and task metrics."""
