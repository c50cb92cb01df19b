"""Generation from any decoder: options, logits processors, greedy and beam search, sampling."""
