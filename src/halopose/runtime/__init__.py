"""The runtime of one file that exported folders contain; it needs numpy only and imports nothing of this package."""
