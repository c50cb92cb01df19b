"""Formats of a job: where rows come from and where results go."""
