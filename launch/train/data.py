"""Real text as token ids, cut into training and validation sequences.

A batch is a pure function of how many samples came before it: the position in the data is one
number, and a resumed run reads what an uninterrupted one would.
"""

import functools
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flce_dist.filtered import frequency_order
from flce_dist.launch.program import RunError
from flce_dist.launch.read import digest, parse_json, read_bytes
from flce_dist.launch.train.config import TEXT_SHA256, RunConfig
from flce_dist.launch.train.ranks import say
from flce_dist.launch.write import replacing, write_json
from flce_dist.launch.yaml_config import read_utf8, require

PART = 1 << 20
"""Characters that one thread encodes, up to the end of a line."""

IGNORED = -100  # what the loss ignores, and no token


@dataclass(frozen=True)
class Corpus:
    """Sequences of ``seq_length + 1`` tokens; labels are the inputs one token later."""

    train: Tensor  # [N, seq_length + 1] int32 or int64
    validation: Tensor  # [M, seq_length + 1], from the end of the text
    vocab_size: int  # entries of the vocabulary, used or not
    seed: int
    sources: dict[str, str] = field(default_factory=dict)  # digests, for checkpoints to hold
    prompt_tokens: int = 0  # of each sequence, whose labels are IGNORED
    new_ids: Tensor | None = None  # [vocab_size], of each token, where they are renumbered

    def train_batch(self, first_sample: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, [batch_size, seq_length] int64, of samples from the start.

        Each pass over the text has an order of its own, drawn from the seed and its number.
        """
        samples = range(first_sample, first_sample + batch_size)
        places = [divmod(sample, len(self.train)) for sample in samples]
        rows = [_order(self.seed, epoch, len(self.train))[place] for epoch, place in places]
        return self._split(self.train[rows])

    def validation_batch(self, index: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of the ``index``-th validation batch, going round at the end."""
        rows = torch.arange(index * batch_size, (index + 1) * batch_size) % len(self.validation)
        return self._split(self.validation[rows])

    def _split(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        ids = sequences.long() if self.new_ids is None else self.new_ids[sequences.long()]
        labels = ids[:, 1:].clone()  # of one sequence the slice is contiguous, and a view
        labels[:, : self.prompt_tokens] = IGNORED
        return ids[:, :-1].contiguous(), labels

    def by_frequency(self, rows: int) -> "Corpus":
        """Return the corpus renumbered for an output layer of so many rows, padding included."""
        counts = torch.bincount(self.train.flatten(), minlength=self.vocab_size)
        new_ids = frequency_order(counts, padded_vocab_size=rows).row_of_token
        digest = hashlib.sha256(new_ids.numpy().tobytes()).hexdigest()
        return replace(self, new_ids=new_ids, sources={**self.sources, "ids.sha256": digest})


class Tokens(NamedTuple):
    path: Path  # an int32 file of NumPy, with its size and SHA-256 beside it
    vocab_size: int
    sources: dict[str, str]  # digests of text and vocabulary


def tokenise(config: RunConfig) -> Tokens:
    """Tokenise the text with Tekken's 131,072-entry vocabulary, which mistral-common carries.

    For one rank. The file lies in a folder ``tokens`` beside ``out_dir`` and is named by the
    digests, for later runs, which make a damaged one anew. A text that is not UTF-8 or too short
    raises ``ConfigError`` before anything is written.
    """
    tokenizer, vocabulary = load_tokenizer()
    if config.data.text is None:  # the manual inside CPython: prose, PSF licence
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    else:
        text = read_utf8(config.data.text, "data.text")
    sources = {
        TEXT_SHA256: hashlib.sha256(text.encode()).hexdigest(),
        "vocabulary.sha256": hashlib.sha256(vocabulary).hexdigest(),
    }
    name = "-".join(digest[:16] for digest in sources.values())
    path = config.out_dir.parent / "tokens" / f"{name}.npy"
    if _is_whole(path):
        cut(np.load(path, mmap_mode="c"), config)
    else:
        if path.exists():
            say(f"{path} is not what {_digest_path(path).name} says; making it anew")
        ids = encode(tokenizer, text)
        cut(ids, config)
        with replacing(path, ids.nbytes) as scratch, scratch.open("wb") as file:
            np.save(file, ids)
        write_json(_digest_path(path), digest(path))
    return Tokens(path, tokenizer.n_words, sources)


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _is_whole(path: Path) -> bool:
    """Whether the file of tokens is there and has the digest that was written beside it."""
    try:
        return bool(parse_json(read_bytes(_digest_path(path))) == digest(path))
    except (OSError, ValueError):
        return False


def open_corpus(config: RunConfig, tokens: Tokens) -> Corpus:
    """Return sequences that stay in the file until a batch needs them.

    Raises ``RunError`` if this rank does not see the file that one rank made.
    """
    try:
        ids = np.load(tokens.path, mmap_mode="c")
    except (OSError, ValueError) as error:
        must = f"{tokens.path} must lie where all ranks see it"
        raise RunError(f"{must}, but one cannot read it: {error}") from error
    sequences = cut(ids, config)
    corpus = Corpus(
        *sequences, tokens.vocab_size, config.seed, tokens.sources, config.data.prompt_tokens
    )
    rows = padded_rows(tokens.vocab_size, config)
    return corpus.by_frequency(rows) if config.data.by_frequency else corpus


def padded_rows(vocab_size: int, config: RunConfig) -> int:
    """Return the rows of the output layer, of which all ranks of a replica hold equally many."""
    return -(-vocab_size // config.parallel.tensor) * config.parallel.tensor


def cut(ids: NDArray[np.int32], config: RunConfig) -> tuple[Tensor, Tensor]:
    """Cut a text into training and validation sequences; ``ConfigError`` if it is too short."""
    width = config.model.seq_length + 1
    fraction = config.data.validation_fraction
    rows = len(ids) // width
    validation = max(1, int(len(ids) * fraction) // width)
    require(
        rows > validation,
        "model.seq_length and data.validation_fraction must leave one training and one validation "
        f"sequence in the text's {len(ids)} tokens, got {config.model.seq_length} and {fraction}",
    )
    sequences = torch.from_numpy(ids)[: rows * width].view(rows, width)
    return sequences[:-validation], sequences[-validation:]


def load_tokenizer() -> tuple[Any, bytes]:
    """Return Tekken's tokenizer, and the content of its file."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    path = files("mistral_common") / "data" / "tekken_240911.json"
    return Tekkenizer.from_file(str(path)), path.read_bytes()


def encode(tokenizer: Any, text: str) -> NDArray[np.int32]:
    """Return what ``tokenizer.encode`` does for the text, cut after lines into parts for threads.

    tiktoken, below it, encodes without the interpreter's lock, and straight into an array.
    """
    parts = re.findall(rf"(?s).{{1,{PART}}}[^\n]*\n?", text)
    of_part = functools.partial(tokenizer._model.encode_to_numpy, disallowed_special=())
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        ids = [part + tokenizer.num_special_tokens for part in threads.map(of_part, parts)]
    whole = np.concatenate([[tokenizer.bos_id], *ids, [tokenizer.eos_id]])
    return whole.astype(np.int32)


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, rows: int) -> list[int]:
    """The order of one pass over ``rows`` sequences."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(rows, generator=generator).tolist()
    return order
