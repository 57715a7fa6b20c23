"""Images on their way into prompts: read, prepared, encoded between steps, and kept for whoever sends them again."""
