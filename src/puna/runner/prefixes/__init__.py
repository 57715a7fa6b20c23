"""What is not computed again: prefixes that the cache or the host's memory holds."""
