"""Puna inside a Python program: ``from puna import Engine``. The same way of a request as the server's, without HTTP."""
