"""The reference Transformer in torch and its training; clarity before speed."""
