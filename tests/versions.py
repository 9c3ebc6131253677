"""``python -m tests.versions``: the tests on each pair of torch and Triton that is supported.

Makes an environment for each under .venv-versions/ (5 to 7 GB, kept for the next time) and runs
``FILES`` there, one process after the other. It ends with a row for each, how many tests passed,
failed and were skipped (also in .venv-versions/results.json), and 1 if one failed. With arguments
(2.9) only these releases of torch run, or those of ``USERS`` (rl, transformers-5; ``users`` for all
of them), whose tests need packages of their own. What follows ``--`` goes to pytest, which then
runs in one process.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-versions"
PAIRS = {
    "2.9": ("torch==2.9.*", "triton==3.5.*", "numpy<2.4"),
    "2.11": ("torch==2.11.*", "triton==3.6.*", "numpy>=2.4"),
    "2.13": ("torch==2.13.*", "triton==3.7.*", "numpy>=2.3"),
    "2.14": ("torch==2.14.*", "triton==3.8.*", "numpy>=2.3"),
    "2.15": ("torch==2.15.*", "triton==3.9.*", "numpy>=2.3"),
}
OTHERS = "pytest pytest-timeout hypothesis setuptools tyro matplotlib tensorboard tqdm rich pyyaml"
FILES = (
    "interpreter", "merge_stats", "api_on_ranks", "main_grad", "main_grad_autograd", "dtensor",
    "fsdp", "testing", "autograd", "backward", "peer_copies", "peer_memory", "module", "filtered",
    "rescue", "compiled", "compiled_on_ranks", "torch_private", "counted", "skip_ignored", "scores",
    "scores_on_ranks", "divergence", "divergence_on_ranks", "data_parallel",
    "data_parallel_training", "frozen", "parallel_style", "refused_tracing", "best_checks",
    "data_parallel_checks", "divergence_checks", "filtered_on_ranks", "low_rank", "optimizer_state",
    "planning", "rank_check_when", "scores_checks", "scores_heads", "temperature", "exported",
)  # fmt: skip
HF = (
    "hf", "hf_hooks", "hf_stand_in", "hf_lora", "hf_adapters", "hf_on_ranks", "hf_trainer",
    "hf_self_check", "hf_docs", "finetune",
)  # fmt: skip
# verl asks for an older transformers than TRL; what is tested of it imports these alone.
VERL = "verl==0.9.1"
RL = "trl==1.16.0 transformers==5.24.0 ray>=2.41 tensordict>=0.8,!=0.9.0,<=0.10 codetiming"
USERS = {
    "rl": (
        "2.13",
        (*RL.split(), "hydra-core"),
        ("compat_trl", "compat_trl_steps", "compat_trl_divergence", "compat_verl"),
    ),
    "transformers-5": ("2.13", ("transformers==5.*", "peft", "accelerate"), HF),
    # With torch 2.9 their loading of tensor-parallel weights on four ranks does not end.
    "transformers-5-torch-2.9": (
        "2.9",
        ("transformers==5.*", "peft", "accelerate"),
        tuple(name for name in HF if name != "hf_on_ranks"),
    ),
    "transformers-4.57": ("2.13", ("transformers==4.57.*", "peft", "accelerate"), HF),
    "torchtitan-0.3": ("2.14", ("torchtitan==0.3.*",), ("compat_torchtitan", "page_scripts")),
}
"""Libraries that a face of this one is for -> release of torch, other packages, test files."""


def python_of(release: str) -> Path:
    """Return the interpreter of the environment of this name; make it if need be."""
    folder = FOLDER / release
    ready = FOLDER / release / "ready"
    python = folder / "bin" / "python"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        torch, more, _ = USERS.get(release, (release, (), ()))
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *PAIRS[torch], *more, *OTHERS.split()], check=True)
        if release == "rl":
            subprocess.run([*install, "--no-deps", VERL], check=True)
            for stray in folder.glob("lib/python*/site-packages/tests"):
                shutil.rmtree(stray)  # verl's own tests, which would hide ours
        ready.touch()
    return python


def run(release: str, arguments: Sequence[str]) -> Counter[str]:
    """Return how many tests passed, failed and so on, by the last line that pytest prints."""
    found: Counter[str] = Counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    *_, files = USERS.get(release, (FILES,))
    try:
        python = python_of(release)
    except subprocess.CalledProcessError as error:  # the other releases go on
        print(error, file=sys.stderr, flush=True)
        return Counter(error=1)
    for targets in [arguments] if arguments else [[f"tests/test_{name}.py"] for name in files]:
        command = [str(python), "-m", "pytest", "-q", *targets]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        print(done.stdout, file=sys.stderr, flush=True)
        # Behind it a destructor may print more.
        last = re.findall(r"^.*(?:passed|failed|error).* in .*$", done.stdout, re.M)[-1:] or [""]
        for n, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", last[0]):
            found[outcome] += int(n)
        found["error"] += done.returncode not in (0, 1)  # pytest itself failed
    return found


def row(release: str, found: Counter[str]) -> str:
    failed = found["failed"] + found["error"]
    if release in USERS:
        return f"| {release} | {found['passed']} | {failed} | {found['skipped']} |"
    pair = " | ".join(re.sub(r"[a-z]+(==)?|\.\*", "", one) for one in PAIRS[release])
    return f"| {pair} | {found['passed']} | {failed} | {found['skipped']} |"


def main(arguments: Sequence[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names = [x for name in arguments[:at] for x in (USERS if name == "users" else [name])]
    known = [*PAIRS, *USERS]
    unknown = set(names) - {*known}
    if unknown:
        sys.exit(f"error: {', '.join(sorted(unknown))} is none of {', '.join(known)}, users")
    results = {release: run(release, arguments[at + 1 :]) for release in names or PAIRS}
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1))
    print("\n".join(row(*one) for one in results.items()))
    return int(any(found["failed"] + found["error"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
