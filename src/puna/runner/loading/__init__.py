"""From a model file and options to a model in memory."""
