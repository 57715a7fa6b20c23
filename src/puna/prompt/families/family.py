from typing import Any

FAMILIES: dict[str, Any] = {}
