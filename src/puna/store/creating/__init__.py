"""From a recipe to a model: weights converted and quantised, layers, a manifest."""
