"""Images of whatever origin as pixels: read in processes that may crash, and that end with the one that asks them."""
