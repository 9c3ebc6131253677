"""Decide every line of the contract for the megatron-core that is imported: PATH gets the JSON."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from flce_dist.testing import RankPool
from tests.contract import gradients, logits, main_grad, training
from tests.contract.compare import LINES, Decision, decide
from tests.contract.models import SETTINGS, Setting

MODULES = gradients, main_grad, training, logits
"""In the order of the table."""


def outcome(pool: RankPool, title: str, at: Setting) -> Decision:
    """Decide a line on all ranks: it passes if it does on each."""
    try:
        outcomes = pool.run(decide, title, at)
    except Exception as error:  # what a rank raised; the pool starts new ones
        return Decision("fail", reason=repr(error))
    outcomes.sort(key=lambda one: ("fail", "n/a", "pass").index(one.result))
    worst = outcomes[0]
    return Decision(worst.result, max(one.error for one in outcomes), worst.reason)


def decide_all() -> dict[str, dict[str, Any]]:
    """Return ``{title: {setting: largest relative error, or "n/a: why", or "fail: why"}}``."""
    found: dict[str, dict[str, Any]] = {title: {} for title in LINES}
    for tp in (1, 2, 4):
        with RankPool(2 * tp, timeout_s=600.0) as pool:
            for at in SETTINGS:
                for title in LINES if at.tp == tp else ():
                    one = outcome(pool, title, at)
                    text = f"{one.result}: {one.reason}"
                    passed = one.result == "pass"
                    found[title][str(at)] = float(f"{one.error:.2g}") if passed else text
                    if one.result == "fail":
                        print(f"{at}, {title}: {text}", file=sys.stderr)
    return found


if __name__ == "__main__":
    release = importlib.metadata.version("megatron-core")
    Path(sys.argv[1]).write_text(json.dumps({"megatron-core": release, "lines": decide_all()}))
