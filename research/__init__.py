"""Commands that produce the figures in docs/. README.md maps every figure to its command. None of them is a test."""
