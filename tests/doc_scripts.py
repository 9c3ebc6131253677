"""Scripts of docs/, run as programs of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A mesh, or DDP, keeps gloo's threads alive. Of a collective one of them releases Python objects,
# and aborts the process if the interpreter is ending then (torch 2.13).
WITHOUT_FINALIZING = "import os, sys; sys.stdout.flush(); os._exit(0)\n"


def scripts_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


def printed(script: str, folder: Path, *launcher: str) -> str:
    """Run a script as a program of its own, on a CPU and without a hub; return what it prints."""
    path = folder / "script.py"
    path.write_text(script)
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
