"""The drop-in for Megatron's saver of a teacher's log-probabilities: its files, without logits.

Megatron 0.19 or newer, with its training package and zstandard.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("zstandard")
pytest.importorskip("megatron.training.distillation")

from megatron.training.distillation import logits_saver as theirs
from megatron.training.distillation import utils_logits

from flce_dist.megatron.teacher_saver import LogitsSaverHooks
from tests.best_problem import close
from tests.contract.models import Setting, batch, gpt
from tests.on_ranks import on_ranks

K, MICROBATCHES = 7, 2


def settings() -> Any:
    """Megatron's arguments, as far as savers read them."""
    args = SimpleNamespace(
        mtp_num_layers=None, iteration=3, curr_iteration=3, seed=1, seq_length=16, train_samples=8
    )
    return mock.patch.multiple(
        theirs,
        get_args=lambda: args,
        get_num_microbatches=lambda: MICROBATCHES,
        get_current_iteration=lambda: args.iteration,
        compute_dataset_hash=lambda: ("hash", {"seed": 1}),
        get_tensorboard_writer=lambda: None,
    )


def saved(saver: Any) -> tuple[list[Tensor], list[Tensor]] | None:
    """Write what a saver holds, and read it as a student does; None on other ranks."""
    path, writes, meta, _ = saver.take_pending_data()
    if not writes:
        return None
    saver._write_batched_tar(path, writes, meta)
    (entry,) = utils_logits.iter_logprobs_tar_entries(path, expected_hash="hash")
    assert entry.iteration == 3 and Path(path).name == "cp0_dp0__3.tar"
    return utils_logits.decode_logprobs_payload(entry.data)


def run(saver_class: Any, at: Setting, folder: Path, tied: bool, **options: Any) -> Any:
    """Train a step of the model with a saver; return what it saved."""
    model = gpt(at, tied=tied).train()
    with settings():
        saver = saver_class(str(folder), K, save_dtype="fp32", **options)
        saver.attach_hooks(model)
        for step in range(MICROBATCHES):
            tokens, positions, labels = batch(step)
            loss = model(tokens, positions, None, labels=labels)
            assert loss.shape == labels.shape and not loss.any()
            loss.sum().backward()
        weight = model.shared_embedding_or_output_weight()
        assert weight.grad is not None and not any(x.grad.any() for x in model.parameters())
        found = saved(saver)
        saver.remove_hooks()
    model.eval()
    logits = model(tokens, positions, None)
    assert logits.shape[-1] == weight.shape[0]
    return found


@pytest.mark.parametrize("options", [{}, {"p": 0.5, "min_k": 2}], ids=str)
@pytest.mark.parametrize(("P", "at", "tied"), [
    (1, Setting(1, False), False), (2, Setting(2, False), True), (2, Setting(2, True), False),
], ids=str)  # fmt: skip
@on_ranks("P")
def test_files_are_those_of_megatrons_own_saver(group, P, at, tied, options, tmp_path):
    found = run(LogitsSaverHooks, at, tmp_path / "ours", tied, **options)
    truth = run(theirs.LogitsSaverHooks, at, tmp_path / "theirs", tied, **options)
    assert (found is None) == (truth is None) == (group.rank() > 0)
    if found is not None:
        for (values, ids), (true_values, true_ids) in zip(
            zip(*found, strict=True), zip(*truth, strict=True), strict=True
        ):
            close(values, true_values)
            assert torch.equal(ids, true_ids) and ids.dtype == true_ids.dtype


@on_ranks(1)
def test_no_logits_exist_while_a_teacher_is_saved(group, tmp_path):
    model = gpt(Setting(1, False)).train()
    real = mock.Mock(side_effect=AssertionError)
    model.output_layer.forward = real
    with settings():
        saver = LogitsSaverHooks(str(tmp_path), K)
        saver.attach_hooks(model)
        tokens, positions, labels = batch()
        model(tokens, positions, None, labels=labels)
    assert not real.called and len(saver._accumulated_results) == 1


@pytest.mark.parametrize("vocabulary", [131072, 262144])
@on_ranks(1)
def test_vocabularies_of_more_than_17_bits(group, vocabulary, tmp_path):
    """Megatron's loader reads ids beyond those that its saver takes."""
    gpt(Setting(1, False))  # initializes the ranks
    hidden, weight = torch.eye(4).view(4, 1, 4), torch.zeros(vocabulary, 4)
    best = torch.tensor([5, 65536, 131071, vocabulary - 1])
    weight[best, torch.arange(4)] = 3.0
    layer = SimpleNamespace(
        output_size=vocabulary, bias=None, skip_bias_add=False, sequence_parallel=False
    )
    with settings():
        saver = LogitsSaverHooks(str(tmp_path), 2)
        for _ in range(MICROBATCHES):
            saver._accumulated_results.append(
                saver._process_single_microbatch((layer, hidden, weight))
            )
        saver._save_accumulated_log_probs()
        found = saved(saver)
    assert found is not None
    values, ids = found
    assert torch.equal(ids[0][:, 0, 0], best) and ids[0][0, 0, 1] == 0
    assert (values[0].diff() < 0).all() and values[0].dtype == torch.float16
