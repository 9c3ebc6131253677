"""Which folder may import which, read from the source of every file. CONTRIBUTING.md says why."""

import ast
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import flce_dist

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for folder in ("flce_dist", "kernels", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if not {"kernels", "launch"} & set(path.relative_to(ROOT).parts[1:-1])  # symlinks
)

FUNCTIONS = {"scores", "best", "divergence"}  # others than the loss, each a folder
CALL = {"arguments", "core", "schedules"}  # one call, from arguments to gradients
LEAVES = {"options", "values", "ways_out", "check_tensors"}  # of arguments

# Each folder with those that it may import; itself always. The files of LEAVES count as the folder
# "leaf".
MAY = {
    "faces": {"leaf", "torch_private", *CALL, "parallel", "testing", "filtered", *FUNCTIONS},
    "filtered": {"leaf", "torch_private", *CALL, "parallel", "kernels", "faces"},
    **{folder: {"leaf", "torch_private", *CALL, "parallel", "kernels"} for folder in FUNCTIONS},
    "arguments": {"leaf", "torch_private", "schedules", "core", "parallel", "kernels"},
    "schedules": {"leaf", "core", "parallel", "kernels"},
    "core": {"leaf", "torch_private", "parallel", "kernels"},
    "parallel": {"leaf", "torch_private"},
    "kernels": {"torch_private"},
    "testing": {"leaf", "torch_private"},
    "leaf": {"torch_private"},
    "torch_private": set(),
    "launch": {"leaf", "torch_private", "faces", "testing", "filtered", *FUNCTIONS},
}
OTHERS = {folder: {"torch", "typing_extensions"} for folder in MAY} | {
    "kernels": {"torch", "triton"},
    "launch": {
        "torch", "megatron", "mistral_common", "numpy", "yaml", "tyro",
        "matplotlib", "rich", "tensorboard", "tqdm",
    },
}  # fmt: skip
LAZILY = {  # inside functions and for type checkers
    "flce_dist/__init__.py": {"<computed>"},  # one of the modules that it lists
    "flce_dist/compat/trl.py": {"trl"},
    "flce_dist/compat/verl.py": {"verl"},
    "flce_dist/hf/plug_in.py": {"transformers"},
    "flce_dist/megatron/plug_in.py": {"megatron"},
    "flce_dist/arguments/check_options.py": {"triton"},
    "launch": {  # peers that a benchmark may find
        "cut_cross_entropy",
        "liger_kernel",
        "peft",
        "transformers",
        "trl",
    },
}
EXCEPTIONS = {
    # A subclass of torchtitan's loss; torchtitan imports the file.
    "flce_dist/compat/torchtitan.py": {"spmd_types", "torchtitan"},
    # Subclasses of megatron-core's layers; imported when a model is plugged in.
    "flce_dist/megatron/column_parallel.py": {"megatron"},
    "flce_dist/megatron/linear_cross_entropy_module.py": {"megatron"},
    # A subclass of megatron-core's teacher saver; imported by who saves.
    "flce_dist/megatron/teacher_saver.py": {"megatron"},
}


def folder_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return folder_of_module(".".join(parts if parts[0] == "flce_dist" else ("", *parts)))


def folder_of_module(name: str) -> str:
    if name.startswith("flce_dist.arguments.") and name.split(".")[2] in LEAVES:
        return "leaf"
    first = f"{name}.".split(".")[1]
    return first if first in MAY else "faces"


def violations(path: Path, source: str, *, excused: bool = True) -> list[str]:
    folder = folder_of(path)
    name = path.relative_to(ROOT).as_posix()
    ours = MAY[folder] | {folder}
    lazily: set[str] = set()
    if excused:
        ours = ours | EXCEPTIONS.get(name, set())
        lazily = LAZILY.get(name, set()) | LAZILY.get(folder, set())
    tree, found = ast.parse(source), []
    for module, is_lazy in imports(tree):
        top = module.split(".")[0]
        if top == "flce_dist":
            allowed = folder_of_module(module) in ours | (lazily if is_lazy else set())
        elif f"{module}.".startswith("torch.distributed."):
            allowed = folder != "kernels"
        elif top in sys.stdlib_module_names:
            allowed = folder == "launch" or top != "argparse"
        else:
            allowed = top in OTHERS[folder] | ours or (is_lazy and top in lazily)
        if not allowed:
            found.append(f"imports {module}" + ("" if is_lazy else " at the top of the file"))
    found += [] if folder == "torch_private" else private_names(tree)
    return found if folder == "launch" else found + list(reads_launcher(tree))


def imports(tree: ast.AST, is_lazy: bool = False) -> Iterator[tuple[str, bool]]:
    for node in ast.iter_child_nodes(tree):
        inside = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inside = True
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                is_module = base in ("flce_dist", "flce_dist.arguments")
                is_module |= base == "torch" and alias.name == "distributed"
                yield (f"{base}.{alias.name}" if is_module else base), is_lazy
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0] if node.args else None
            yield (str(name.value) if isinstance(name, ast.Constant) else "<computed>"), is_lazy
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed", is_lazy
        yield from imports(node, inside)


# Of Python, megatron-core, TRL and tiktoken; of torch what a subclass of nn.Module may
# override, and the mark of DataParallel's replicas.
PRIVATE_OF_OTHERS = {
    "_exit", "_current_frames", "_processes", "_fields", "_make", "_replace", "_asdict", "_modules",
    "_model", "_ChunkedLogProbFunction", "_apply", "_is_replica", "_save_to_state_dict",
    "_load_from_state_dict",
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "__fsdp_param__", "__version__", "__file__", "__future__", "__wrapped__", "__func__",
}  # fmt: skip


def private_names(tree: ast.Module) -> list[str]:
    """Names with an underscore that the file neither makes itself nor has from those above."""
    own = PRIVATE_OF_OTHERS.union(*map(dir, (object, private_names, BaseException, sys)))
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            used |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            used |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.ctx, ast.Store) or ast.unparse(node.value) in ("self", "cls")
            (own if is_own else used).add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            used |= {str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return [f"uses {name}" for name in sorted(used - own) if name.startswith("_")]


def reads_launcher(tree: ast.AST) -> Iterator[str]:
    """The launcher's environment and command line are launch/'s alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            yield f"reads {node.value}"
        if isinstance(node, ast.Attribute) and node.attr == "argv":
            yield "reads argv"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_only_what_its_folder_may(path):
    assert violations(path, path.read_text()) == []


def test_every_file_is_seen():
    assert {folder_of(path) for path in FILES} == set(MAY)


@pytest.mark.parametrize("name", [*EXCEPTIONS, *LAZILY])
def test_every_exception_is_needed(name):
    """Each name of it, in the file or in one of the folder."""
    path = ROOT / name
    files = [path] if path.suffix else [x for x in FILES if folder_of(x) == name]
    unexcused = [text for x in files for text in violations(x, x.read_text(), excused=False)]
    for module in EXCEPTIONS.get(name, set()) | LAZILY.get(name, set()):
        assert any(f"imports {module}" in f"{text}." for text in unexcused), module


@pytest.mark.parametrize("name", flce_dist.__all__)
def test_annotations_can_be_read(name):
    """By documentation and validation at run time."""
    typing.get_type_hints(getattr(flce_dist, name))


def test_the_library_imports_no_triton():
    """It is imported by the first call on a GPU, and may be missing where there is none."""
    program = "import flce_dist, sys; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize(("file", "source"), [
    ("kernels/new.py", "import torch\n\nx = torch.distributed.get_rank()"),
    ("flce_dist/core/new.py", "def f():\n    from flce_dist.api import linear_cross_entropy"),
    ("flce_dist/api.py", "import os\nrank = int(os.environ['RANK'])"),
    ("flce_dist/megatron/plug_in.py", "from megatron.core import parallel_state"),
    ("flce_dist/vocab_shard.py", "getattr(x, '__create_chunk_list__')()"),
])  # fmt: skip
def test_a_violation_is_found(file, source):
    assert len(violations(ROOT / file, source)) == 1
