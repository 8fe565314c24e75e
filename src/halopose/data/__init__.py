"""Annotated images and user files, read into checked arrays and written back."""
