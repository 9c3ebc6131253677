"""The folders at the top, and the packaging that imports them as packages inside flce_dist."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import versions
from tests.contract import __main__ as contract
from tests.processes import started
from tests.versions import FILES, PAIRS, RL, USERS, VERL

ROOT = Path(__file__).parent.parent
LINKED = ("kernels", "launch")


def modules_of() -> list[str]:
    found = []
    for folder, _, names in os.walk(ROOT / "flce_dist", followlinks=True):
        parts = Path(folder).relative_to(ROOT).parts
        modules = [name.removesuffix(".py") for name in names if name.endswith(".py")]
        found += [".".join((*parts, name)).removesuffix(".__init__") for name in modules]
    return found


def test_nothing_shadows_another_package_and_pytest_finds_ours(pytestconfig):
    assert pytestconfig.getini("pythonpath") == [ROOT]
    for path in (path for name in LINKED for path in (ROOT / name).rglob("*.py")):
        assert path.stem != "__init__", f"{path} makes its folder shadow other packages"
        assert path.stem not in sys.stdlib_module_names, f"{path} is named after one of Python's"


def test_constraints_pin_each_requirement_exactly():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    names = [pin.split("==")[0] for pin in pins]
    assert names == sorted(set(names)), "keep one pin of each, sorted"
    assert all(pin.count("==") == 1 for pin in pins)
    assert {"torch", "triton", "megatron-core", "numpy"} <= set(names)


def test_versions_that_are_tested_are_those_of_pyproject_and_of_the_docs():
    text = (ROOT / "pyproject.toml").read_text()
    patterns = r'"torch>=([\d.]+)"', r'"triton>=(.*),<(.*)"'
    (oldest,), ((first, beyond),) = (re.findall(pattern, text) for pattern in patterns)
    tritons = [pair[1].removeprefix("triton==").removesuffix(".*") for pair in PAIRS.values()]
    assert next(iter(PAIRS)) == oldest and tritons[0] == first
    assert tritons[-1] == f"3.{int(beyond.removeprefix('3.')) - 1}"
    page = (ROOT / "docs" / "testing.md").read_text()
    assert all(f"\n| {torch}" in page for torch in PAIRS)
    files = {*FILES, *(name for *_, files in USERS.values() for name in files)}
    assert all((ROOT / "tests" / f"test_{name}.py").exists() for name in files)


@pytest.mark.parametrize("main", [versions.main, contract.main])
def test_a_release_that_is_none_of_ours_is_named(main):
    with pytest.raises(SystemExit, match=r"^error: 0\.5 is none of .*\d"):
        main(["0.5"])


def test_pages_name_the_releases_that_make_users_installs():
    torch_of_rl, _, _ = USERS["rl"]
    torch_of_titan, titan, _ = USERS["torchtitan-0.3"]
    of_pages = {
        "rl_libraries": (f"torch=={torch_of_rl}", VERL, *(x for x in RL.split() if "==" in x)),
        "torchtitan": (f"torch=={torch_of_titan}", *titan),
    }
    for page, pins in of_pages.items():
        text = (ROOT / "docs" / f"{page}.md").read_text()
        (tried,) = re.findall(r"^## Tried\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        for pin in pins:
            release = pin.replace("==", " ").removesuffix(".*")
            assert re.search(rf"\b{re.escape(release)}\b", tried, re.I), f"{page}: {release}"


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
modules, packages, *installs = sys.argv[1:]
for name in list(sys.modules):
    if name.startswith(("flce_dist", "__editable__")):
        del sys.modules[name]
# Without other installs of flce_dist.
sys.meta_path = [x for x in sys.meta_path if "__editable__" not in str(x)]
own = [path for path in sys.path if path.startswith(sys.base_prefix)]
sys.path = [*packages.split(os.pathsep), *own]
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
for name in ("launch", "launch.train", "launch.bench"):
    try:
        runpy.run_module(f"flce_dist.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(f"{name}: exit status {end.code}", flush=True)
os._exit(0)  # what the libraries do at the end takes as long as all this
"""


def make_install(kind: str, folder: Path) -> Path:
    tree = folder / "tree"  # a copy of what a build reads: the checkout gets no build products
    for name in ("flce_dist", *LINKED):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    if kind == "checkout":
        return tree
    if kind == "wheel of a zip":
        for link in (tree / "flce_dist" / name for name in LINKED):
            link.unlink()
            link.write_text(f"../{link.name}")  # as some programs unpack a zip
    return build(tree, "build_editable" if kind == "editable" else "build_wheel")


@pytest.fixture(scope="module")
def installs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of install, with the output of PROGRAM in a file beside it."""
    tyro = pytest.importorskip("tyro")
    made = {kind: make_install(kind, tmp_path_factory.mktemp("install")) for kind in KINDS}
    packages = [path for path in sys.path if path.endswith("-packages")]
    packages.append(str(Path(tyro.__file__).parents[1]))  # which may be a folder of its own
    told = " ".join(modules_of()), os.pathsep.join(packages), *map(str, made.values())
    logs = tmp_path_factory.mktemp("logs")
    with started([sys.executable, "-c", PROGRAM, *told], logs, forks=True) as run:
        assert run.finish() == ([0], [""])
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_is_found_in_each_kind_of_install(installs, kind):
    install = installs[kind]
    output = install.with_name(f"{install.name}.txt").read_text()
    modules = modules_of()
    found = [line.split()[1] for line in output.splitlines() if line.startswith("found ")]
    assert {"flce_dist.launch.train.__main__", "flce_dist.kernels.eager"} <= set(modules)
    assert len(set(found)) == len(modules), output
    tree = install if install.name == "tree" else install.parent
    assert all(Path(origin).is_relative_to(tree) for origin in found)
    for program in ("launch", "launch.train", "launch.bench"):
        assert f"usage: python -m flce_dist.{program}" in output
        assert f"{program}: exit status 0\n" in output
    assert "\n  verify       Check " in output
    if kind.startswith("wheel"):
        assert len(list(install.rglob("*.py"))) == len(modules)
        assert (install / "flce_dist/py.typed").exists()
