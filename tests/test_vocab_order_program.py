"""``python -m flce_dist.launch.vocab_order``: counts, orders, and checkpoints converted by them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("tyro")

from flce_dist import LinearCrossEntropy, vocab_range
from flce_dist.filtered import frequency_order
from flce_dist.launch.program import RunError
from flce_dist.launch.vocab_order.__main__ import main
from flce_dist.launch.yaml_config import ConfigError

V, ROWS = 700, 704


def saved(path: Path, x: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    torch.save(x, path)
    return str(path)


def counts() -> Tensor:
    return torch.randint(1000, (V,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def order(tmp_path: Path) -> str:
    np.save(tmp_path / "counts.npy", counts().numpy())
    path = str(tmp_path / "order.pt")
    assert main(["order", str(tmp_path / "counts.npy"), "--out", path]) == 0
    return path


def run(*args: Any) -> None:
    assert main([str(arg) for arg in args]) == 0


def test_counts_of_a_text(tmp_path):
    pytest.importorskip("mistral_common")
    (tmp_path / "a").write_text("the end of the text")
    for name in ("counts.npy", "counts.pt"):
        run("count", tmp_path / "a", tmp_path / "a", "--out", tmp_path / "new" / name)
    found = np.load(tmp_path / "new" / "counts.npy")
    assert found.shape == (131_072,) and found.dtype == np.int64
    assert found.sum() == 2 * 7 and sorted(found)[-3:] == [2, 2, 2]  # with <s> and </s>
    assert torch.equal(torch.load(tmp_path / "new" / "counts.pt"), torch.from_numpy(found))


def test_an_order_is_that_of_frequency_order(tmp_path):
    path, out = saved(tmp_path / "counts.pt", counts()), tmp_path / "order.pt"
    run("order", path, "--out", out, "--padded-vocab-size", 900)
    wanted = frequency_order(counts(), padded_vocab_size=900).token_of_row
    assert torch.equal(torch.load(out), wanted)


def test_a_converted_module_loads_and_computes_the_same(tmp_path, order):
    plain = LinearCrossEntropy(8, V, padded_vocab_size=ROWS, bias=True)
    assert plain.bias is not None
    torch.nn.init.normal_(plain.bias)
    path = saved(tmp_path / "head.pt", plain.state_dict())
    run("convert", path, "--to", "ordered", "--order", order, "--out", tmp_path / "new")
    tokens = torch.load(order)
    head = LinearCrossEntropy(8, V, padded_vocab_size=ROWS, bias=True, vocab_order=tokens)
    head.load_state_dict(torch.load(tmp_path / "new" / "head.pt"))
    hidden, labels = torch.randn(20, 8), torch.randint(V, (20,))
    torch.testing.assert_close(head(hidden, labels), plain(hidden, labels))
    torch.testing.assert_close(head.logits(hidden), plain.logits(hidden))

    run("convert", tmp_path / "new" / "head.pt", "--to", "plain", "--out", tmp_path / "back")
    back = torch.load(tmp_path / "back" / "head.pt")
    assert back.keys() == plain.state_dict().keys()
    assert all(torch.equal(back[name], x) for name, x in plain.state_dict().items())


@pytest.mark.parametrize(
    ("P", "file", "first"),
    [(2, "{}", 1), (3, "rank{}.pt", 0), (12, "rank{}.pt", 0), (12, "tp{:02}_of_12.pt", 1)],
)
def test_files_of_ranks(tmp_path, order, P, file, first):
    """Rows move between ranks, which names say in whatever order they are given; the rest stays."""
    name = "output_layer.weight"
    whole, other = torch.randn(ROWS, 8), torch.randn(5)
    shards = [whole[slice(*vocab_range(ROWS, rank, P))] for rank in range(P)]
    names = [file.format(rank) for rank in range(first, first + P)]
    folders = (tmp_path / "old", tmp_path / "new", tmp_path / "back")
    old, new, back = ([folder / name for name in names] for folder in folders)
    for path, shard in zip(old, shards, strict=True):
        saved(path, {name: shard, "other": other})
    to, tokens = ("--order", order, "--out", tmp_path / "new", "--names", name), torch.load(order)
    for given in (sorted(old), old[::-1], old[P // 2 :] + old[: P // 2]):
        run("convert", *given, "--to", "ordered", *to)
        states = [torch.load(path) for path in new]
        rows = torch.cat([state[name] for state in states])
        assert torch.equal(rows[:V], whole[tokens]) and torch.equal(rows[V:], whole[V:])
    for state, shard in zip(states, shards, strict=True):
        assert state[name].shape == shard.shape and torch.equal(state["other"], other)
        assert torch.equal(state["output_layer.row_of_token"], tokens.argsort())
    run("convert", *new, "--to", "plain", "--out", tmp_path / "back", "--names", name)
    for path, shard in zip(back, shards, strict=True):
        state = torch.load(path)
        assert state.keys() == {name, "other"} and torch.equal(state[name], shard)


NAMES = ["a b", "rank0 rank2", "rank2 rank3", "rank1 rank01", "rank0 other1", "tp0_pp0 tp1_pp1"]


@pytest.mark.parametrize("names", NAMES)
def test_names_that_do_not_say_the_ranks_are_refused(tmp_path, order, names):
    half = {"weight": torch.ones(V // 2, 2)}
    files = [saved(tmp_path / f"{i}" / name, half) for i, name in enumerate(names.split())]
    with pytest.raises(ConfigError, match=r"but for one number, the rank, counted from 0 or 1"):
        run("convert", *files, "--to", "ordered", "--order", order, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_read_is_not_replaced(tmp_path, order):
    text, numbers = tmp_path / "s.txt", tmp_path / "counts.npy"
    text.write_text("a text")
    head = saved(tmp_path / "old" / "order.pt", {"weight": torch.ones(V, 2)})
    (tmp_path / "link").symlink_to(tmp_path / "old", target_is_directory=True)
    before = {path: path.read_bytes() for path in (text, numbers, Path(order), Path(head))}
    to = ("--to", "ordered", "--order", order, "--out")
    for arguments in (
        ("count", text, "--out", text),
        ("order", numbers, "--out", numbers),
        ("convert", head, *to, tmp_path),  # the file of the order
        ("convert", head, *to, tmp_path / "link"),
    ):
        with pytest.raises(ConfigError, match=r"--out must not replace .*, which is read; got"):
            run(*arguments)
    assert before == {path: path.read_bytes() for path in before}


WEIGHT, MAP = torch.ones(V, 2), torch.arange(V)
FILES: dict[str, Any] = {
    "head": {"weight": WEIGHT},
    "short": {"weight": torch.ones(V - 1, 2)},
    "ordered": {"weight": WEIGHT, "row_of_token": MAP},
    "permuted": {"weight": WEIGHT, "row_of_token": torch.zeros_like(MAP)},
    "bias": {"bias": torch.ones(V)},
    "list": [1],
    "negative": torch.tensor([3, -1]),
}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("convert short.pt {ordered}", "short.pt.* must have the 700 rows .* got 699"),
        ("convert ordered.pt {ordered}", "ordered.pt.* have an order already"),
        ("convert head.pt {plain}", "head.pt.* no row_of_token"),
        ("convert permuted.pt {plain}", "permuted.pt.* each of 700 token ids once"),
        ("convert bias.pt {ordered}", "bias.pt.* no tensor weight with rows"),
        ("convert list.pt {ordered}", "list.pt must hold a dict of tensors by name, got list"),
        ("convert head.pt --to ordered --out new", "--to ordered needs --order"),
        ("convert head.pt --to ordered --out new --order no.pt", "no.pt cannot be read: No such"),
        ("convert {ordered}", "files must name at least one file"),
        ("convert head.pt {plain} --order order.pt", "--to plain takes the order from"),
        ("order text.pt", "must be a file of torch.save"),
        ("order head.pt", "must hold a tensor, got dict"),
        ("order negative.pt", "negative.pt: counts must be at least 0, got -1"),
        ("order order.pt --out new --padded-vocab-size 1", "padded_vocab_size must be at"),
        ("count", "texts must name at least one file"),
        ("count no.txt", "texts must name a file that can be read"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path, order, command, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        saved(tmp_path / f"{name}.pt", content)
    (tmp_path / "text.pt").write_text("text")
    to = {"ordered": "--to ordered --order order.pt --out new", "plain": "--to plain --out new"}
    with pytest.raises(ConfigError, match=message):
        run(*command.format(**to).split())
    assert not (tmp_path / "new").exists()


def test_a_file_is_whole_or_not_there(tmp_path, order):
    half = {"weight": torch.ones(V // 2, 2)}
    files = [saved(tmp_path / "old" / name, half) for name in ("0", "1")]
    (tmp_path / "new" / "1").mkdir(parents=True)  # which no file can replace
    (tmp_path / "file").touch()
    to = ("--to", "ordered", "--order", order, "--out")
    with pytest.raises(RunError, match=r"cannot write .*file/0"):
        run("convert", *files, *to, tmp_path / "file")
    with pytest.raises(RunError, match=r"cannot write .*new/1"):
        run("convert", *files, *to, tmp_path / "new")
    assert not list((tmp_path / "new").glob("*.tmp"))
