"""Where models come from: one module per kind of source."""
