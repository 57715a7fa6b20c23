"""What is asked of a model: completions, embeddings, rankings."""
