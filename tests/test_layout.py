"""The folders at the top, and the packaging that imports them as packages inside flce_dist."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("kernels", "launch")


def packages_of(root: Path) -> dict[str, str]:
    """Return ``{package: folder}`` for every folder that holds modules, as the tree has them."""
    found = {}
    for top in ("flce_dist", *LINKED):
        for path in (root / top).rglob("*.py"):
            folder = path.relative_to(root).parent
            inside = folder.parts if top == "flce_dist" else ("flce_dist", *folder.parts)
            found[".".join(inside)] = str(folder)
    return dict(sorted(found.items()))


def modules_of(root: Path) -> list[str]:
    """Return the name of every module in those folders."""
    return [
        package if path.stem == "__init__" else f"{package}.{path.stem}"
        for package, folder in packages_of(root).items()
        for path in sorted((root / folder).glob("*.py"))
    ]


def layout_problems(root: Path) -> list[str]:
    """Return what would break the import of some folder in some kind of install."""
    problems = []
    for name in ("pyproject.toml", "README.md", "flce_dist", "tests", "configs", *LINKED):
        if not (root / name).exists():
            problems.append(f"{name} is missing")
    for name in LINKED:
        link = root / "flce_dist" / name
        if not link.is_symlink() or str(link.readlink()) != f"../{name}":
            problems.append(f"flce_dist/{name} must be a symlink to ../{name}")
        for path in (root / name).rglob("*.py"):
            if path.name == "__init__.py":
                problems.append(f"{path.relative_to(root)} makes {name} shadow other packages")
            if path.stem in sys.stdlib_module_names:
                problems.append(f"{path.relative_to(root)} is named after a module of Python")
    text = (root / "pyproject.toml").read_text()
    listed = set(re.findall(r'^    "([\w.]+)",$', text, re.MULTILINE))
    folders = dict(re.findall(r'^"([\w.]+)" = "([\w/]+)"$', text, re.MULTILINE))
    for package, folder in packages_of(root).items():
        if package not in listed:
            problems.append(f"{package} is not in `packages` and drops out of the wheel")
        if not folder.startswith("flce_dist") and folders.get(package) != folder:
            problems.append(f"package-dir must map {package} to {folder}")
    return problems


def test_layout() -> None:
    assert layout_problems(ROOT) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_sources(tmp_path / "tree")


def copy_sources(copy: Path) -> Path:
    """Copy what a build reads, so that the checkout gets no build products."""
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("flce_dist", *LINKED):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("tests", "configs"):
        (copy / name).mkdir()
    return copy


def test_what_would_break_an_install_is_found(tree: Path) -> None:
    assert layout_problems(tree) == []
    for path in ("kernels/__init__.py", "launch/bench/profile.py", "flce_dist/new/module.py"):
        (tree / path).parent.mkdir(exist_ok=True)
        (tree / path).touch()
    (tree / "configs").rmdir()
    (tree / "flce_dist" / "launch").unlink()
    assert len(layout_problems(tree)) == 5


def test_pytest_finds_the_packages_with_nothing_installed(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("testpaths") == ["tests"]
    assert pytestconfig.getini("pythonpath") == [ROOT]


def test_constraints_pin_each_requirement_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    names = [pin.split("==")[0] for pin in pins]
    assert names == sorted(set(names)), "keep one pin of each, sorted"
    assert all(pin.count("==") == 1 for pin in pins)
    assert {"torch", "triton", "megatron-core", "numpy"} <= set(names)


def without_symlinks(tree: Path) -> Path:
    """Turn symlinks into files that hold their target, as some programs unpack a zip."""
    for name in LINKED:
        link = tree / "flce_dist" / name
        link.unlink()
        link.write_text(f"../{name}")
    return tree


def build(tree: Path, hook: str) -> Path:
    """Build a wheel by one of setuptools' hooks; return the folder that it is installed into."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    program = f"from setuptools import build_meta; build_meta.{hook}('wheels')"
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, capture_output=True)
    (path,) = tree.glob("wheels/*.whl")
    zipfile.ZipFile(path).extractall(tree / "site")
    return tree / "site"


KINDS = ("checkout", "wheel", "wheel of a zip", "editable")

PROGRAM = """
import importlib.util, os, runpy, site, sys
import torch.distributed.tensor, tyro  # once for all installs
modules, *installs = sys.argv[1:]
for install in installs:
    if os.fork() == 0:
        break
    os.wait()
else:
    sys.exit()
output = os.open(install + ".txt", os.O_CREAT | os.O_WRONLY)
os.dup2(output, 1)
os.dup2(output, 2)
sys.path.insert(0, install)
site.addsitedir(install)
for name in modules.split():
    print("found", importlib.util.find_spec(name).origin)
sys.argv[1:] = ["--help"]
for name in ("train", "bench"):
    try:
        runpy.run_module(f"flce_dist.launch.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(f"{name}: exit status {end.code}", flush=True)
os._exit(0)  # what the libraries do at the end takes as long as all this
"""


def make_install(kind: str, folder: Path) -> Path:
    """Return the folder that a kind of install puts on Python's path."""
    tree = copy_sources(folder / "tree")
    if kind == "checkout":
        return tree
    if kind == "wheel of a zip":
        without_symlinks(tree)
    return build(tree, "build_editable" if kind == "editable" else "build_wheel")


@pytest.fixture(scope="module")
def installs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of install, with the output of PROGRAM in a file beside it."""
    pytest.importorskip("tyro")
    made = {kind: make_install(kind, tmp_path_factory.mktemp("install")) for kind in KINDS}
    packages = [path for path in sys.path if path.endswith("-packages")]
    subprocess.run(
        # -S: without the .pth files of other installs of flce_dist.
        [sys.executable, "-S", "-c", PROGRAM, " ".join(modules_of(ROOT)), *map(str, made.values())],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={"PYTHONPATH": os.pathsep.join(packages), "PATH": os.environ["PATH"]},
        check=True,
    )
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_is_found_in_each_kind_of_install(
    installs: dict[str, Path], kind: str
) -> None:
    install = installs[kind]
    output = install.with_name(f"{install.name}.txt").read_text()
    modules = modules_of(ROOT)
    found = [line.split()[1] for line in output.splitlines() if line.startswith("found ")]
    assert {"flce_dist.launch.train.__main__", "flce_dist.kernels.eager"} <= set(modules)
    assert len(set(found)) == len(modules), output
    tree = install if install.name == "tree" else install.parent
    assert all(Path(origin).is_relative_to(tree) for origin in found)
    for program in ("train", "bench"):
        assert f"usage: python -m flce_dist.launch.{program}" in output
        assert f"{program}: exit status 0\n" in output


def test_wheel_contains_every_module_once(installs: dict[str, Path]) -> None:
    (wheel,) = installs["wheel"].parent.glob("wheels/*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package, folder in packages_of(ROOT).items()
        for path in (ROOT / folder).glob("*.py")
    }
    assert sorted(name for name in names if name.endswith(".py")) == sorted(expected)
    assert "flce_dist/py.typed" in names
