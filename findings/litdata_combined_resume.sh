#!/usr/bin/env bash
# litdata 0.2.76: a StreamingDataLoader of a CombinedStreamingDataset, with several workers, that is
# resumed from its state_dict amid an epoch leaves out some samples and repeats others, also with
# the same workers and batch size, as its documentation asks for. The state has the samples that
# each worker has taken of each dataset, but a dataset is told their sum alone and takes it that
# they were taken evenly. No error, no warning, and the number of samples is right; without workers,
# and with one dataset, a resumed loader goes on exactly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 litdata==0.2.76
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable()
import litdata  # noqa: E402
from litdata.streaming.cache import Cache  # noqa: E402


def write(folder, first):
    """Write 80 samples that are numbers from the first on."""
    cache = Cache(folder, chunk_size=10)
    for index in range(80):
        cache[index] = first + index
    cache.done()
    cache.merge()
    return folder


def make_loader(folders, workers):
    datasets = [litdata.StreamingDataset(folder, shuffle=False) for folder in folders]
    dataset = datasets[0]
    if len(datasets) > 1:
        dataset = litdata.CombinedStreamingDataset(datasets, seed=42, iterate_over_all=True)
    return litdata.StreamingDataLoader(dataset, batch_size=4, num_workers=workers)


def main():
    is_as_described = True
    with tempfile.TemporaryDirectory() as root:
        folders = [write(f"{root}/{first}", first) for first in (0, 1000)]
        for chosen in (folders[:1], folders):
            for workers in (0, 2, 3):
                batches = [batch.tolist() for batch in make_loader(chosen, workers)]
                expected = sorted(sum(batches, []))
                print(f"{len(chosen)} dataset(s), {workers} workers, {len(batches)} batches")
                wrong = 0
                for stop in (7, 9, 11):
                    loader = make_loader(chosen, workers)
                    iterator = iter(loader)
                    before = [next(iterator).tolist() for _ in range(stop)]
                    state = loader.state_dict()
                    resumed = make_loader(chosen, workers)
                    resumed.load_state_dict(state)
                    samples = sum(before + [batch.tolist() for batch in resumed], [])
                    missing = sorted(set(expected) - set(samples))
                    repeated = sorted({s for s in samples if samples.count(s) > 1})
                    wrong += bool(missing)
                    print(f"    resumed after {stop}: {len(samples)} samples,", end=" ")
                    print(f"missing {missing}, repeated {repeated}")
                if len(chosen) > 1 and workers > 0:
                    is_as_described &= wrong > 0
                else:
                    is_as_described &= wrong == 0
    sys.exit(0 if is_as_described else "combined datasets are resumed exactly")


if __name__ == "__main__":
    main()
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
