"""Routes that wait until somebody asks: they answer as all others."""

from __future__ import annotations

from starlette.routing import Match, Route

from puna.server.apis.routes import all_routes
from puna.server.http.later import Later, flattened


def test_no_path_of_later_routes_is_out_of_their_reach() -> None:
    later = [group for group in all_routes() if isinstance(group, Later)]
    assert sum(len(group.routes) for group in later) > 20
    for group in later:
        for route in group.routes:
            path = route.path.replace("{digest}", "sha256:0").replace("{model}", "m")
            for method in route.methods or ():
                match, _ = group.matches({"type": "http", "path": path, "method": method, "headers": []})
                assert match is Match.FULL, (route.path, method)
            assert group.matches({"type": "http", "path": path, "method": "TRACE", "headers": []})[0] is Match.PARTIAL
        assert group.matches({"type": "http", "path": "/nowhere", "method": "GET", "headers": []})[0] is Match.NONE


def test_no_two_routes_are_for_the_same_request() -> None:
    routes = [route for route in flattened(all_routes()) if isinstance(route, Route)]
    operations = [(route.path, method) for route in routes for method in route.methods or ()]
    assert len(set(operations)) == len(operations)
