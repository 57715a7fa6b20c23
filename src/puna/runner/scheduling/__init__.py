"""Who runs: admission, and which tokens the next step computes."""
