"""Tokenizers of checkpoints as AutoTokenizer of transformers makes them."""
