"""Training: data, vocabulary, the loop, and its recipe."""
