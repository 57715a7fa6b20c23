"""One machine of a cluster: the models that it holds, for all heads."""
