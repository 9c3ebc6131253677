"""How a private name of torch is looked up that nothing can replace."""

from typing import Any

import torch


def needed(owner: Any, name: str, use: str) -> Any:
    """Return ``owner.name``; without it this ``use`` is not supported."""
    attribute = getattr(owner, name, None)
    if attribute is None:
        raise NotImplementedError(f"{use} needs {name}, which torch {torch.__version__} lacks")
    return attribute
