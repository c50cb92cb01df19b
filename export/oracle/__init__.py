"""Torch in float32 and float64: cases and expected answers."""
