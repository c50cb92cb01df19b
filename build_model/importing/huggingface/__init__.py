"""Import of models of Hugging Face as checkpoints."""
