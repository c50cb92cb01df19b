"""Certificates of a bundle: their files, signatures and validity."""
