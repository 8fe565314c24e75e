"""The method (paper, section 3): distributions, heads, context features, pruning. Knows no framework and no file
format.
"""
