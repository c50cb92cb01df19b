"""The proof for graphs that other tools wrote."""
