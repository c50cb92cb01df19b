"""Resumable jobs over files: readers, writers, the journal, and distributed runs."""
