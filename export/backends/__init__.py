"""Other runtimes for the portable graphs, and the cross-check that asks them."""
