"""Files of the web page, copied unchanged."""
