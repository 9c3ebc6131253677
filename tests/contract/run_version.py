"""Decide every line of the contract for the megatron-core that is imported: PATH gets the JSON."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from flce_dist.testing import RankPool
from tests.contract import gradients, logits, main_grad, readers, training
from tests.contract.compare import LINES, decide
from tests.contract.models import SETTINGS, Setting

MODULES = gradients, main_grad, training, logits, readers
"""In the order of the table."""


def outcome(pool: RankPool, title: str, at: Setting) -> float | str:
    """Decide a line on all ranks: the largest relative error, or "n/a: why", or "fail: why"."""
    try:
        found = pool.run(decide, title, at)
    except Exception as error:  # what a rank raised; the pool starts new ones
        return f"fail: {error!r}"
    return found[0] if isinstance(found[0], str) else float(f"{max(found):.2g}")


def decide_all() -> dict[str, dict[str, Any]]:
    """Return ``{title: {setting: outcome}}``."""
    found: dict[str, dict[str, Any]] = {title: {} for title in LINES}
    for tp in (1, 2, 4):
        with RankPool(2 * tp, timeout_s=600.0) as pool:
            for at in SETTINGS:
                for title in LINES if at.tp == tp else ():
                    found[title][str(at)] = one = outcome(pool, title, at)
                    if str(one).startswith("fail"):
                        print(f"{at}, {title}: {one}", file=sys.stderr)
    return found


if __name__ == "__main__":
    release = importlib.metadata.version("megatron-core")
    Path(sys.argv[1]).write_text(json.dumps({"megatron-core": release, "lines": decide_all()}))
