"""The method itself (paper, section 3): laws, heads, calibration, pruning. Knows no host and no file."""
