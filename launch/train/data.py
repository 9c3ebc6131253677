"""Real text as token ids, cut into training and validation sequences.

The whole corpus fits in memory, so a batch is a pure function of how many samples came before it:
the position in the data is one number, and a resumed run reads what an uninterrupted one would.
"""

import hashlib
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from flce_dist.launch.train.config import TEXT_SHA256, RunConfig
from flce_dist.launch.yaml_config import ConfigError, read_utf8


@dataclass(frozen=True)
class Corpus:
    """Sequences of ``seq_length + 1`` tokens; labels are the inputs one token later.

    Attributes:
        train: [N, seq_length + 1] int64.
        validation: [M, seq_length + 1] int64, from the end of the text.
        vocab_size: number of entries of the vocabulary, used or not.
        sources: SHA-256 of the text and of the vocabulary, by name, for checkpoints to hold.
    """

    train: Tensor
    validation: Tensor
    vocab_size: int
    seed: int
    sources: dict[str, str] = field(default_factory=dict)

    def train_batch(self, first_sample: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, [batch_size, seq_length], of samples counted from the start.

        Each pass over the text has an order of its own, drawn from the seed and its number.
        """
        rows = [self._row(sample) for sample in range(first_sample, first_sample + batch_size)]
        return _split(self.train[rows])

    def validation_batch(self, index: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of the ``index``-th validation batch, going round at the end."""
        rows = torch.arange(index * batch_size, (index + 1) * batch_size) % len(self.validation)
        return _split(self.validation[rows])

    def _row(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self.train))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return int(torch.randperm(len(self.train), generator=generator)[place])


def load_corpus(config: RunConfig) -> Corpus:
    """Tokenise the text with Tekken's 131,072-entry vocabulary, which mistral-common carries.

    Raises:
        ConfigError: if the text is not UTF-8, or too short for one training and one validation
            sequence.
    """
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    vocabulary = files("mistral_common") / "data" / "tekken_240911.json"
    tokenizer = Tekkenizer.from_file(str(vocabulary))
    text = read_text(config.data.text)
    tokens = torch.tensor(tokenizer.encode(text, bos=True, eos=True))

    width = config.model.seq_length + 1
    validation_rows = max(1, int(len(tokens) * config.data.validation_fraction) // width)
    rows = len(tokens) // width
    if rows <= validation_rows:
        raise ConfigError(
            f"model.seq_length must leave one training and one validation sequence in the text's "
            f"{len(tokens)} tokens, got {config.model.seq_length}"
        )
    sequences = tokens[: rows * width].view(rows, width)
    return Corpus(
        train=sequences[:-validation_rows],
        validation=sequences[-validation_rows:],
        vocab_size=tokenizer.n_words,
        seed=config.seed,
        sources={
            TEXT_SHA256: hashlib.sha256(text.encode()).hexdigest(),
            "vocabulary.sha256": hashlib.sha256(vocabulary.read_bytes()).hexdigest(),
        },
    )


def read_text(path: Path | None) -> str:
    """Return the file's text, or the reference manual inside CPython (prose, PSF licence)."""
    if path is not None:
        return read_utf8(path, "data.text")
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _split(sequences: Tensor) -> tuple[Tensor, Tensor]:
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
