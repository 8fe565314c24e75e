"""Deployment without PyTorch: ONNX export of model and heads, a single-file runtime, and a web page."""
