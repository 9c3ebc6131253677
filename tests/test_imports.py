"""Who may import whom, read from the source of every file. CONTRIBUTING.md has the table."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"flce_dist": "flce_dist", "kernels": "flce_dist.kernels", "launch": "flce_dist.launch"}
FILES = sorted(path for folder in ROOMS for path in (ROOT / folder).glob("*.py"))
MODULES = {path.stem for path in (ROOT / "flce_dist").glob("*.py")} | {"kernels", "launch"}


@dataclass(frozen=True)
class Rule:
    """What a file may import beside the standard library.

    ``ours`` are modules of flce_dist (a package stands for all in it), ``others`` top-level names
    of other projects, ``lazily`` those allowed only inside functions and for type checkers.
    """

    ours: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset({"torch"})
    lazily: frozenset[str] = frozenset()
    sends: bool = True  # may touch torch.distributed
    starts: bool = False  # may read argv, YAML and the launcher's environment

    def allows(self, module: str, lazy: bool) -> bool:
        top = module.split(".")[0]
        if module == "flce_dist":
            return module in self.ours
        if top == "flce_dist":
            return any(f"{module}.".startswith(f"{name}.") for name in self.ours - {"flce_dist"})
        if f"{module}.".startswith("torch.distributed."):
            return self.sends and "torch" in self.others
        if top in sys.stdlib_module_names:
            return self.starts or top != "argparse"
        return top in self.others or (lazy and top in self.lazily)


def ours(*names: str) -> frozenset[str]:
    return frozenset(f"flce_dist.{name}" for name in names)


LEAVES = ours("options", "plan", "vocab")
PUBLIC = LEAVES | ours("megatron", "memory", "module", "reference", "testing", "launch")
RANKS = ours("error_budget", "forked_ranks", "threaded_ranks")

LEAF = Rule(ours=LEAVES, others=frozenset())
HEAD = Rule(ours=LEAVES | ours("api", "checks", "collectives"), lazily=frozenset({"megatron"}))
OTHER = Rule(ours=LEAVES)  # a new file of flce_dist/, until this table knows better
KERNELS = Rule(ours=ours("kernels"), others=frozenset({"torch", "triton"}), sends=False)
LAUNCH = Rule(
    ours=PUBLIC | {"flce_dist"},
    others=frozenset({"torch", "megatron", "mistral_common", "numpy", "yaml", "tyro"})
    | frozenset({"matplotlib", "rich", "tensorboard", "tqdm"}),
    lazily=frozenset({"cut_cross_entropy", "liger_kernel"}),  # peers that a benchmark may find
    starts=True,
)
# The rival form is built of the same kernels' pieces, so that nothing else differs.
TILE_MAX = Rule(ours=ours("kernels"), others=frozenset({"torch", "triton"}), sends=False)
TABLE = {
    "options": LEAF,
    "plan": LEAF,
    "vocab": LEAF,
    "token_order": Rule(),
    "collectives": Rule(ours=ours("token_order")),
    "peer_driver": Rule(lazily=frozenset({"cuda"})),
    "peer_watch": Rule(),
    "peer_memory": Rule(ours=ours("peer_driver", "peer_watch")),
    "peer_groups": Rule(ours=ours("peer_driver", "peer_memory")),
    "peer_copies": Rule(ours=ours("collectives", "peer_memory", "token_order")),
    "memory": Rule(ours=ours("peer_groups")),
    "reference": Rule(ours=ours("collectives")),
    "checks": Rule(ours=LEAVES, lazily=frozenset({"triton"})),
    "call": Rule(
        ours=LEAVES | ours("kernels", "collectives", "peer_copies", "peer_groups", "token_order")
    ),
    "steps": Rule(ours=LEAVES | ours("kernels", "collectives", "call")),
    "dlogits": Rule(ours=LEAVES | ours("kernels", "call", "collectives")),
    "dhidden": Rule(ours=LEAVES | ours("kernels", "call", "collectives", "dlogits")),
    "gradients": Rule(ours=LEAVES | ours("kernels", "call", "collectives", "dhidden", "dlogits")),
    "autograd": Rule(ours=LEAVES | ours("kernels", "call", "dlogits", "gradients", "steps")),
    "prepare": Rule(ours=LEAVES | ours("call", "checks", "collectives", "token_order")),
    "dtensor": Rule(ours=LEAVES | ours("checks", "collectives", "prepare")),
    "library": Rule(
        ours=LEAVES | ours("autograd", "checks", "collectives", "gradients", "kernels", "prepare")
    ),
    "api": Rule(
        ours=LEAVES | ours("autograd", "checks", "dtensor", "library", "prepare", "reference")
    ),
    "rank_check": Rule(ours=LEAVES | ours("checks", "collectives", "dtensor", "prepare")),
    "module": Rule(ours=HEAD.ours | ours("dtensor")),
    "megatron": HEAD,
    "error_budget": Rule(ours=RANKS),
    "forked_ranks": Rule(ours=RANKS),
    "threaded_ranks": Rule(ours=RANKS),
    "testing": Rule(ours=RANKS),
    "__init__": Rule(ours=LEAVES | ours("api", "module", "rank_check")),
}


def rule_of(path: Path) -> Rule:
    if path.parent.name == "kernels":
        return KERNELS
    if "launch" in (path.parent.name, path.parent.parent.name):
        return TILE_MAX if path.stem == "tile_max" else LAUNCH
    return TABLE.get(path.stem, OTHER)


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield ``(module, lazy)`` for each import, however it is written."""
    for node in ast.iter_child_nodes(tree):
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inside = True
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                is_module = base == "flce_dist" and alias.name in MODULES
                is_module |= base == "torch" and alias.name == "distributed"
                yield (f"{base}.{alias.name}" if is_module else base), lazy
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0] if node.args else None
            yield (str(name.value) if isinstance(name, ast.Constant) else "<computed>"), lazy
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed", lazy
        yield from imports(node, inside)


def violations(source: str, rule: Rule) -> list[str]:
    """Return what ``source`` does that ``rule`` forbids; empty if all is well."""
    tree = ast.parse(source)
    found = [
        f"imports {module}" + ("" if lazy else " at the top of the file")
        for module, lazy in imports(tree)
        if not rule.allows(module, lazy)
    ]
    if not rule.starts:
        found += _reads_launcher(tree)
    return found


def _reads_launcher(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            yield f"reads {node.value}"
        if isinstance(node, ast.Attribute) and node.attr == "argv":
            yield "reads argv"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_only_what_its_room_may(path: Path) -> None:
    assert violations(path.read_text(), rule_of(path)) == []


def test_the_table_names_only_files_that_exist() -> None:
    assert sorted(set(TABLE) - MODULES) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/new.py", "from flce_dist.parallel.vocab import vocab_range"),
        ("kernels/new.py", "from flce_dist import collectives"),
        ("kernels/new.py", "import torch.distributed as dist"),
        ("kernels/new.py", "from torch import distributed"),
        ("kernels/new.py", "import torch\n\nx = torch.distributed.get_rank()"),
        ("kernels/new.py", "import numpy"),
        ("flce_dist/plan.py", "import torch"),
        ("flce_dist/vocab.py", "from flce_dist import api"),
        ("flce_dist/collectives.py", "from flce_dist.kernels import merge"),
        ("flce_dist/autograd.py", "def f():\n    from flce_dist.api import linear_cross_entropy"),
        ("flce_dist/api.py", "from flce_dist.kernels.gemm import matmul"),
        ("flce_dist/api.py", "from flce_dist.launch import train"),
        ("flce_dist/api.py", "from importlib import import_module\nimport_module('flce_dist.x')"),
        ("flce_dist/api.py", "from .options import LossOptions"),
        ("flce_dist/api.py", "import os\nrank = int(os.environ['RANK'])"),
        ("flce_dist/api.py", "import sys\nprint(sys.argv)"),
        ("flce_dist/api.py", "import argparse"),
        ("flce_dist/megatron.py", "from megatron.core import parallel_state"),
        ("flce_dist/megatron.py", "import yaml"),
        ("flce_dist/new.py", "from flce_dist.parallel.collectives import group_size"),
        ("launch/new.py", "from flce_dist.op.autograd import LinearCrossEntropyFunction"),
        ("launch/new.py", "from flce_dist import collectives"),
        ("launch/new.py", "from flce_dist.kernels import gemm"),
        ("launch/new.py", "import pandas"),
    ],
)
def test_a_violation_is_found(file: str, source: str) -> None:
    assert len(violations(source, rule_of(ROOT / file))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/new.py", "import math\nimport triton.language as tl\nfrom torch import Tensor"),
        ("kernels/new.py", "from flce_dist.kernels.gemm import matmul"),
        ("flce_dist/megatron.py", "def f():\n    from megatron.core import parallel_state"),
        ("flce_dist/megatron.py", "if TYPE_CHECKING:\n    from megatron.core import ModelConfig"),
        ("launch/new.py", "import os\nimport sys\nimport yaml\nsys.argv, os.environ['RANK']"),
        ("launch/new.py", "from flce_dist import linear_cross_entropy, plan"),
        ("launch/new.py", "from flce_dist.launch.train.config import TrainConfig"),
    ],
)
def test_what_the_table_allows_passes(file: str, source: str) -> None:
    assert violations(source, rule_of(ROOT / file)) == []
