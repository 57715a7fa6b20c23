"""How long a step may take, and what steps take on this machine."""
