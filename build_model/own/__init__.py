"""Modules of the user's own, as models for export."""
