"""Matching detections to annotated objects (COCO greedy matching by OKS)."""
