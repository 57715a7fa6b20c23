"""Tiny checkpoints of each family as it is published, and what their authors' program computes of them."""
