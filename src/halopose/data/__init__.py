"""Annotated images and files: what the user has on disk, as checked arrays and back."""
