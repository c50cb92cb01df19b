"""Import of Hugging Face checkpoints as runs; transformers itself is not needed."""
