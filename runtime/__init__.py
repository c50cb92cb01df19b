"""Runs a bundle with onnxruntime: numpy, onnxruntime and tiktoken, and nothing heavier."""
