"""Rewrites of exported graphs: fused linear layers, int8 weights and KV cache, top-k."""
