"""What models see: images of whatever origin as pixels, and one encoder per family."""
