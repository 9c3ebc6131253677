"""JSON that any reader takes: Python's own writes NaN and Infinity, which JSON does not have."""

import json
import math
from typing import Any


def strict_json(value: Any, *, indent: int | None = 1) -> str:
    """Return ``value`` as JSON, with null in place of each number that is not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
