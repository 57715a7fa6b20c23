"""One step: the forward pass and the choice of tokens."""
