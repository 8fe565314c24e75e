"""What a page is made of: copied as it is."""
