"""One file per family of encoders, read top to bottom."""
