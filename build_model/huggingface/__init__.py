"""Checkpoints of Hugging Face's transformers, turned into runs; transformers is not needed."""
