"""The fixed top level, and the packaging that lets kernels/ and launch/ live there."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLAT = ("kernels", "launch")


def top_level_problems(root: Path) -> list[str]:
    """Return what would break the import of kernels/ and launch/ in some kind of install."""
    problems = []
    for name in ("pyproject.toml", "README.md", "flce_dist", "tests", "configs", *FLAT):
        if not (root / name).exists():
            problems.append(f"{name} is missing")
    for name in FLAT:
        link = root / "flce_dist" / name
        if not link.is_symlink() or str(link.readlink()) != f"../{name}":
            problems.append(f"flce_dist/{name} must be a symlink to ../{name}")
        if (root / name / "__init__.py").exists():
            problems.append(f"{name}/__init__.py makes {name} shadow other packages")
        for nested in root.glob(f"{name}/*/**/*.py"):
            problems.append(f"{nested.relative_to(root)} is nested and drops out of the wheel")
    for path in root.glob("launch/*.py"):
        if path.stem in sys.stdlib_module_names:
            problems.append(f"launch/{path.name} is named after a module of Python")
    return problems


def make_top_level(root: Path) -> None:
    for name in ("flce_dist", "tests", "configs", *FLAT):
        (root / name).mkdir()
    for name in ("pyproject.toml", "README.md"):
        (root / name).touch()
    for name in FLAT:
        (root / "flce_dist" / name).symlink_to(f"../{name}")


def test_top_level() -> None:
    assert top_level_problems(ROOT) == []


def test_top_level_problems_are_found(tmp_path: Path) -> None:
    make_top_level(tmp_path)
    assert top_level_problems(tmp_path) == []
    (tmp_path / "configs").rmdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    (tmp_path / "kernels" / "sm90").mkdir()
    (tmp_path / "kernels" / "sm90" / "gemm.py").touch()
    (tmp_path / "launch" / "profile.py").touch()
    (tmp_path / "flce_dist" / "launch").unlink()
    assert len(top_level_problems(tmp_path)) == 5


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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of a copy, so that the checkout gets no build products."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("flce_dist", *FLAT):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(out), str(copy)]
    subprocess.run(command, check=True)
    (path,) = out.glob("*.whl")
    return path


def test_wheel_contains_every_module_once(wheel: Path) -> None:
    expected = {f"flce_dist/{path.name}" for path in ROOT.glob("flce_dist/*.py")}
    expected |= {f"flce_dist/{name}/{p.name}" for name in FLAT for p in ROOT.glob(f"{name}/*.py")}
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if name.endswith(".py")) == sorted(expected)
    assert "flce_dist/py.typed" in names


def test_wheel_imports_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import flce_dist, flce_dist.kernels.eager as eager\n"
        "print(flce_dist.__file__, eager.__file__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
    )
    site = str(tmp_path / "site" / "flce_dist")
    assert [path.startswith(site) for path in run.stdout.split()] == [True, True]
