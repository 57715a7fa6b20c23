"""One stored model: what its layers and its files say, and how people write that down."""
