"""Pose models as ONNX files; no training framework is needed."""
