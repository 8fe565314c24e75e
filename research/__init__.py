"""Experiments: long commands whose figures stand in docs/results.md. None of them is a test."""
