"""``python -m tests.rl_libraries``: the tests of flce_dist.compat, with TRL and verl installed.

Makes an environment under .venv-versions/rl (kept for the next time) with the releases of
``PACKAGES``; arguments go to pytest.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import triton

from tests.versions import FOLDER, OTHERS, ROOT

TORCH = torch.__version__.partition("+")[0]
PACKAGES = f"torch=={TORCH} triton=={triton.__version__} trl==1.16.0 transformers==5.23.0"
# verl asks for an older transformers; what is tested of it imports these alone.
OF_VERL = "ray>=2.41 tensordict>=0.8,!=0.9.0,<=0.10 codetiming hydra-core"
FILES = ("tests/test_compat_trl.py", "tests/test_compat_verl.py")


def python() -> Path:
    """Return the environment's interpreter; make the environment if need be."""
    folder, ready = FOLDER / "rl", FOLDER / "rl" / "ready"
    found = folder / "bin" / "python"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(found), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *PACKAGES.split(), *OF_VERL.split(), *OTHERS.split()], check=True)
        subprocess.run([*pip, "--no-deps", "verl==0.9.1"], check=True)
        for stray in folder.glob("lib/python*/site-packages/tests"):
            shutil.rmtree(stray)  # verl's own tests, which would hide ours
        ready.touch()
    return found


if __name__ == "__main__":
    command = [str(python()), "-m", "pytest", "-q", *FILES, *sys.argv[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)
