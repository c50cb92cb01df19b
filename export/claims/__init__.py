"""What a bundle says of itself, against the run that it was exported from."""
