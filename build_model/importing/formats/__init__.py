"""File formats of weights: safetensors, pickled and other tensors, one at a time."""
