"""Puna inside a Python program: ``from puna import Engine``. The same way of a request as the server's, without HTTP."""

import logging

# Whose program it is decides what is logged where: without a handler Python would print to standard error.
logging.getLogger("puna").addHandler(logging.NullHandler())
