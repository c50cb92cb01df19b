"""From a torch checkpoint to a bundle, and the proof that both give the same answers."""
