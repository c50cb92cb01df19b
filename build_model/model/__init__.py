"""The reference model, as in the papers; clarity before speed."""
