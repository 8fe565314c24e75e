"""A world to fly in: scenes, pictures of them, and approaches."""
