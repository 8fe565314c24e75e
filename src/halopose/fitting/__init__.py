"""From a frozen base and annotated images to a calibrated artifact."""
