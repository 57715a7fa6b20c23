"""The server of a cluster, as far as it is not the server of one machine: it has no models, and knows the nodes that do."""
