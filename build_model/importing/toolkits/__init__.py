"""Models in the formats of Marian and sentence-transformers; neither package is needed."""
