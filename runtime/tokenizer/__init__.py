"""Text to token ids and back: byte-pair encoding by tiktoken, and third-party tokenizers."""
