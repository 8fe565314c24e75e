"""Without PyTorch: the model with its heads as one ONNX graph, a runtime of one file, a page for the browser."""
