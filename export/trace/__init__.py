"""The graphs of a bundle: the reference's modules traced to ONNX, and stored weights."""
