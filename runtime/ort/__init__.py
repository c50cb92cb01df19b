"""The graphs of a bundle run by onnxruntime: sessions, decoders, the encoder, the LM head."""
