"""Localisation of a fault: the traced program and the served graph, node by node."""
