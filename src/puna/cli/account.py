"""``puna signin`` and ``puna signout``: whose models this machine's key may push."""

from __future__ import annotations

import sys
import webbrowser

from puna.cli.connect import connected
from puna.cli.terminal import is_terminal, printable
from puna.errors import PunaError


def signin() -> None:
    """Add this machine's key to an account, so that it may push there."""
    with connected() as client:
        reply = client.me()
    name = str(reply.get("name") or "")
    if name:
        print(f"You are already signed in as user '{printable(name)}'")
        return
    url = str(reply.get("signin_url") or "")
    if not url.startswith(("https://", "http://")):
        raise PunaError("the server does not say where to sign in")
    print(f"To sign in, open this address and add the key of this machine to your account:\n\n    {printable(url)}\n")
    if is_terminal(sys.stdout):
        webbrowser.open(url)


def signout() -> None:
    """Take this machine's key out of the account that it is in."""
    with connected() as client:
        was_in = client.sign_out()
    print("You have signed out of ollama.com" if was_in else "You are not signed in to ollama.com")
