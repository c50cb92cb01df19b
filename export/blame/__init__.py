"""Cause of a failed check: the module, the operator or the runtime at fault."""
