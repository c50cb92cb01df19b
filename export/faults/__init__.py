"""Faults planted in copies of a bundle, and the self-test that demands they are caught."""
