"""``GET /api/status``, ``POST /api/me``, ``POST /api/signout``: the account that this machine's key belongs to, if any.

Source: Ollama's REST API, "Account, cloud, experimental".
"""

from __future__ import annotations

import logging

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.errors import SourceError
from puna.server.http.replies import json_response
from puna.server.pipeline import Pipeline
from puna.store.sources.registry.account import NotSignedIn

log = logging.getLogger(__name__)


async def status(_: Request) -> Response:
    return json_response({"cloud": {"disabled": True, "source": "none"}})


async def me(request: Request) -> Response:
    account = Pipeline.of(request).store.account
    try:
        user = await to_thread.run_sync(account.user)
    except NotSignedIn as error:
        return json_response({"error": str(error), "signin_url": error.url}, 401)
    except SourceError as error:
        log.warning("the account could not be asked for: %s", error)
        return json_response({"error": "account unavailable"}, 503)
    return json_response({**user, "plan": user.get("plan") or "free"})


async def signout(request: Request) -> Response:
    account = Pipeline.of(request).store.account
    try:
        await to_thread.run_sync(account.sign_out)
    except NotSignedIn:
        return json_response({"error": "you are not currently signed in"}, 401)
    except SourceError as error:
        log.warning("could not sign out: %s", error)
        return json_response({"error": "there was an error signing out"}, 500)
    return json_response(None)


routes = [
    Route("/api/status", status, methods=["GET"]),
    Route("/api/me", me, methods=["POST"]),
    Route("/api/signout", signout, methods=["POST"]),
]
