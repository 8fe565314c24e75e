"""Damaged and hostile files through every reader: each is read or refused in one line, and at once."""
