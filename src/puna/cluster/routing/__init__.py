"""Where a request goes, where a model goes, and when there are more of it or fewer: decisions, no connections and no Ray."""
