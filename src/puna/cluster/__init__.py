"""One server over many machines: each holds models of its own, and a request goes where its beginning was computed before."""
