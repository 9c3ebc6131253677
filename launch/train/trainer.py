"""One rank's share of a run: a step, a validation, a checkpoint."""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.launch.program import RunError
from flce_dist.launch.train.attention import zigzag
from flce_dist.launch.train.checkpoint import Checkpoint, Position, clean, load, newest_whole, save
from flce_dist.launch.train.config import HeadConfig, RunConfig, flatten, resume_conflicts
from flce_dist.launch.train.data import Corpus
from flce_dist.launch.train.head import (
    Head,
    check_head,
    each_token,
    head_input,
    megatron_head,
    our_head,
    run_head,
)
from flce_dist.launch.train.model import (
    Groups,
    build_model,
    distribute,
    filter_shares,
    initialize_megatron,
    token_losses,
)
from flce_dist.launch.train.optimizer import Optimizer
from flce_dist.launch.train.ranks import on_rank_0, say, together
from flce_dist.launch.train.state import (
    model_state,
    optimizer_state,
    random_state,
    restore,
    restore_random,
)
from flce_dist.launch.write import writing
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.megatron.fused_layer import FusedLayer
from flce_dist.memory import shared_bytes


class Trainer:
    """One rank's share of a run: model, optimizer, data, and how far it has come.

    Attributes:
        model: the ``GPTModel``; ``distributed`` is the same in Megatron's DDP.
        filtered: ``filter_shares`` of the latest step, means over all ranks.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device):
        self.config, self.corpus, self.device = config, corpus, device
        self.groups: Groups = initialize_megatron(config, device)
        order_by = corpus.token_counts() if config.head.vocab_order else None
        self.model = build_model(config, corpus.vocab_size, device, order_by)
        self.distributed = distribute(self.model)
        self.optimizer = Optimizer(self.distributed, config.optimizer, device)
        self.is_ours = config.head.kind == HeadConfig.kind
        self.step = self.samples = 0
        self.stopping = False
        self.filtered: dict[str, float] = {}
        self.checkpoints = config.out_dir / "checkpoints"
        # What a checkpoint must agree with to be continued.
        self.identity = {
            **flatten(config),
            "head.vocab_order": _order_digest(self.model),
            **corpus.sources,
            "world_size": dist.get_world_size(),
        }

    def resume(self) -> Checkpoint | None:
        """Continue from the newest whole checkpoint, if there is one; collective.

        Raises:
            RunError: on every rank, if it was made with another configuration, or all are damaged.
        """
        checkpoint = on_rank_0(lambda: _find(self.checkpoints, self.config, self.identity))
        if checkpoint is not None:
            together(lambda: self._restore(checkpoint))
            self.step, self.samples = checkpoint.position.step, checkpoint.position.samples
        return checkpoint

    def _restore(self, checkpoint: Checkpoint) -> None:
        mine = load(checkpoint, dist.get_rank())
        restore_random(mine, self.device)
        shared = mine
        if self.groups.copies.rank() > 0:
            shared = load(checkpoint, dist.get_global_rank(self.groups.copies, 0))
        restore(model_state(self.optimizer), _named("model.", shared))
        restore(optimizer_state(self.optimizer), _named("optimizer.", mine))

    def save(self) -> None:
        """Write a checkpoint; collective. Of copies of the weights the first is written.

        Raises:
            RunError: on every rank, if any rank's state is not finite or cannot be written.
        """
        state = random_state(self.device) | optimizer_state(self.optimizer)
        if self.groups.copies.rank() == 0:
            state |= model_state(self.optimizer)
        together(lambda: _require_finite_state(self.step, state))
        position = Position(step=self.step, samples=self.samples, config=self.identity)
        save(self.checkpoints, position, state, keep=self.config.keep_checkpoints)

    def train_step(self, *, stop: bool = False) -> tuple[float, float]:
        """Do one update; return the loss over all ranks' batches and the gradient norm.

        Both are the same on every rank, and not finite if any rank's is not. ``stopping`` says
        afterwards, on every rank alike, whether any was told to ``stop``.
        """
        from megatron.core.distributed import finalize_model_grads

        microbatches, losses, filtered = self.config.data.microbatches, [], []
        self.distributed.zero_grad_buffer()
        for i in range(microbatches):
            loss = self._loss(*self.corpus.train_batch(*self._samples(i)))
            (loss / microbatches).backward()
            losses.append(loss.detach())
            filtered.append(filter_shares(self.model))
        finalize_model_grads([self.distributed])
        self.step += 1
        self.samples += self.samples_per_step
        shares = [torch.stack([each[name] for each in filtered]).mean() for name in filtered[0]]
        means = self._mean(torch.stack(losses).mean(), float(stop), *shares)
        norm = self.optimizer.step(self.step)
        mean, stops, *values = means()
        self.stopping = stops > 0
        self.filtered = dict(zip(filtered[0], values, strict=True))
        return mean, norm

    @property
    def samples_per_step(self) -> int:
        data = self.config.data
        return data.batch_size * data.microbatches * self.groups.data.size()

    def _samples(self, i: int) -> tuple[int, int]:
        """First sample and number of samples of this replica's ``i``-th microbatch."""
        size, data = self.config.data.batch_size, self.groups.data
        return self.samples + (i * data.size() + data.rank()) * size, size

    def validate(self) -> float:
        """Return the loss over the validation batches, the same on every rank; collective."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # losses, tokens
        data, group = self.config.data, self.groups.data
        with torch.no_grad(), each_token(self.model.output_layer):
            for i in range(data.validation_batches):
                batch = i * group.size() + group.rank()
                tokens, labels = self.corpus.validation_batch(batch, data.batch_size)
                losses = self._token_losses(tokens, labels)
                total[0] += losses.double().sum()
                total[1] += losses.numel()
        dist.all_reduce(total)
        loss, tokens = total.tolist()
        return loss / tokens

    def probe_batch(self, index: int = 0) -> tuple[Tensor, Tensor]:
        """A validation batch on the device, the same on all replicas."""
        tokens, labels = self.corpus.validation_batch(index, self.config.data.batch_size)
        return self._to_device(tokens), self._to_device(labels)

    def head_peak_mib(self) -> float:
        """Check the head and measure its peak memory on one batch, without a trace in the run."""
        given = head_input(self.model, *self.probe_batch())
        head: Head = megatron_head
        if isinstance(self.model.output_layer, FusedLayer):
            head = our_head
            check_head(self.model, given, self.groups.tensor)
        # The first run on a GPU also makes the workspaces that libraries keep.
        run_head(head, self.model, given, self.groups.tensor)
        return run_head(head, self.model, given, self.groups.tensor).peak_bytes / 2**20

    def memory(self) -> dict[str, float]:
        """Return this GPU's peak memory since the last call, other GPUs' view of it included."""
        if self.device.type == "cpu":
            return {}
        peak = torch.cuda.max_memory_allocated(self.device) + shared_bytes()
        torch.cuda.reset_peak_memory_stats(self.device)
        return {"peak_mib": peak / 2**20}

    def _loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of this rank's tokens, of which all ranks have the same number."""
        losses = self._token_losses(tokens, labels)
        return losses.sum() / (labels.numel() // self.groups.context.size())

    def _token_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of this rank's share of sequences [b, s], by token or summed."""
        return token_losses(self.distributed, self._to_device(tokens), self._to_device(labels))

    def _to_device(self, x: Tensor) -> Tensor:
        """Copy this rank's share of sequences [b, s] to the device, without waiting for it."""
        share = zigzag(x, 1, self.groups.context.rank(), self.groups.context.size())
        if self.device.type == "cpu":
            return share
        return share.pin_memory().to(self.device, non_blocking=True)

    def _mean(self, *numbers: Tensor | float) -> Callable[[], list[float]]:
        """Return a function that returns means over all ranks, once the device has come there.

        Ranks of one tensor-parallel group hold the same loss.
        """
        each = [
            x.detach() if isinstance(x, Tensor) else torch.full((), x, device=self.device)
            for x in numbers
        ]
        means = torch.stack(each) / dist.get_world_size()
        dist.all_reduce(means)
        if self.device.type != "cuda":
            return means.tolist
        host, done = means.to("cpu", non_blocking=True), torch.cuda.Event()
        done.record()

        def values() -> list[float]:
            done.synchronize()
            return host.tolist()

        return values


def _order_digest(model: Any) -> str | None:
    """Return the SHA-256 of the vocabulary's order; None without one."""
    order = getattr(model.output_layer, "vocab_order", None)
    return None if order is None else hashlib.sha256(order.row_of_token.numpy()).hexdigest()


def _named(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith(prefix)}


def _find(directory: Path, config: RunConfig, identity: dict[str, object]) -> Checkpoint | None:
    """Return the checkpoint to continue, None to start anew; for one rank."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint = newest_whole(directory, say, anew_if_damaged=config.anew_if_damaged)
        if checkpoint is not None:
            conflicts = resume_conflicts(checkpoint.position.config, identity)
            if conflicts:
                raise ConfigError(
                    f"cannot continue {checkpoint.path}: {'; '.join(conflicts)}. "
                    "Use the old values, or another --out-dir"
                )
        clean(directory, checkpoint, say)
    return checkpoint


def require_finite(step: int, numbers: dict[str, float]) -> None:
    wrong = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if wrong:
        raise RunError(
            f"step {step}: {', '.join(wrong)}, so the run stops without a checkpoint of this step; "
            "the same command continues from the last one, and would come to the same numbers: "
            "change, in a new --out-dir, what they depend on, such as optimizer.lr"
        )


def _require_finite_state(step: int, state: dict[str, Tensor]) -> None:
    wrong = {name: x for name, x in state.items() if not x.isfinite().all()}
    first = {name: float(x[~x.isfinite()][0]) for name, x in list(wrong.items())[:3]}
    require_finite(step, first)
