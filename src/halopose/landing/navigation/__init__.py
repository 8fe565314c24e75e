"""Sensors and the filter that fuses them."""
