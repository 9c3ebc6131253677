"""The training loop: how a run begins, continues and ends, and one rank's share of it."""

import math
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.launch.about import about
from flce_dist.launch.process_group import on_rank_0, together
from flce_dist.launch.program import RunError
from flce_dist.launch.train import compare, model
from flce_dist.launch.train.checkpoint import Checkpoint, clean, newest_whole, save
from flce_dist.launch.train.config import RunConfig, flatten, resume_conflicts
from flce_dist.launch.train.data import IGNORED, Corpus
from flce_dist.launch.train.log import RUN, RunLog, plot_loss_curve
from flce_dist.launch.train.optimizer import Optimizer
from flce_dist.launch.train.ranks import said, say
from flce_dist.launch.write import write_json, writing
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.memory import shared_bytes


class Trainer:
    """One rank's share of a run: model, optimizer, data, and how far it has come.

    Attributes:
        model: the ``GPTModel``; ``distributed`` is the same in Megatron's DDP.
        identity: what a checkpoint must agree with to be continued.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device):
        self.config = config
        self.corpus = corpus
        self.device = device
        groups = model.initialize_megatron(device, config.seed, config.parallel.tensor)
        self.tensor_group, self.data_group = groups
        self.model = model.build_model(config, corpus.vocab_size, device)
        self.distributed = model.distribute(self.model)
        self.optimizer = Optimizer(self.distributed, config.optimizer, device)
        self.step = self.samples = 0
        self.checkpoints = config.out_dir / "checkpoints"
        data = config.data
        self.samples_per_step = data.batch_size * data.microbatches * self.data_group.size()
        world_size = dist.get_world_size()
        self.identity = {**flatten(config), **corpus.sources, "world_size": world_size}

    def train_step(self) -> dict[str, float]:
        """Do one update; return the mean loss and ``filter_shares``, and the gradient norm.

        They are the same on every rank, and not finite if any rank's is not.
        """
        from megatron.core.distributed import finalize_model_grads

        data = self.config.data
        group = self.data_group
        numbers = []
        self.distributed.zero_grad_buffer()
        for i in range(data.microbatches):
            first = self.samples + (i * group.size() + group.rank()) * data.batch_size
            tokens, labels = self.corpus.train_batch(first, data.batch_size)
            loss = self._mean_loss(tokens, labels)
            (loss / data.microbatches).backward()
            shares = model.filter_shares(self.model)
            numbers.append(torch.stack([loss.detach(), *shares.values()]))
        finalize_model_grads([self.distributed])
        self.step += 1
        self.samples += self.samples_per_step
        # Ranks of one tensor-parallel group hold the same numbers.
        means = torch.stack(numbers).mean(0) / dist.get_world_size()
        dist.all_reduce(means)
        measured = dict(zip(["loss", *shares], means.tolist(), strict=True))
        return measured | {"gradient_norm": self.optimizer.step(self.step)}

    def validate(self) -> float:
        """Return the loss over the validation batches, the same on every rank; collective."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        data = self.config.data
        group = self.data_group
        with torch.no_grad():
            for i in range(data.validation_batches):
                batch = i * group.size() + group.rank()
                tokens, labels = self.corpus.validation_batch(batch, data.batch_size)
                total += self._mean_loss(tokens, labels)
        dist.all_reduce(total)
        return total.item() / (data.validation_batches * dist.get_world_size())

    def head_alone(self) -> compare.HeadAlone:
        """Return the head's input for the first validation batch, on all replicas; collective."""
        tokens, labels = self.corpus.validation_batch(0, self.config.data.batch_size)
        batch = self._to_device(tokens), self._to_device(labels)
        return compare.HeadAlone(self.model, *batch, self.tensor_group)

    def memory(self) -> dict[str, float]:
        """Return this GPU's peak memory since the last call, other GPUs' view of it included."""
        if self.device.type == "cpu":
            return {}
        peak = torch.cuda.max_memory_allocated(self.device) + shared_bytes()
        torch.cuda.reset_peak_memory_stats(self.device)
        return {"peak_mib": peak / 2**20}

    def save(self) -> None:
        """Write a checkpoint, as ``checkpoint.save``. The first replica writes the weights."""
        state = self.optimizer.state()
        if self.data_group.rank() == 0:
            state |= self.optimizer.weights()
        checkpoint = Checkpoint(self.checkpoints, self.step, self.samples, self.identity)
        save(checkpoint, state, keep=self.config.keep_checkpoints)

    def resume(self) -> Checkpoint | None:
        """Continue from the newest whole checkpoint, if there is one; collective.

        Raises ``RunError`` on every rank if it is of another configuration, or all are damaged.
        """
        checkpoint = on_rank_0(self._find)
        if checkpoint is not None:
            together(lambda: self.optimizer.restore(self._state_in(checkpoint)))
            self.step = checkpoint.step
            self.samples = checkpoint.samples
        return checkpoint

    def _find(self) -> Checkpoint | None:
        """Return the checkpoint to continue, None to start anew; for one rank."""
        with writing(self.checkpoints):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            checkpoint = newest_whole(self.checkpoints, say)
            if checkpoint is not None:
                conflicts = resume_conflicts(checkpoint.config, self.identity)
                if conflicts:
                    raise ConfigError(
                        f"cannot continue {checkpoint.path}: {'; '.join(conflicts)}. "
                        "Use the old values, or another --out-dir"
                    )
            clean(self.checkpoints, checkpoint, say)
        return checkpoint

    def _state_in(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        state = checkpoint.load(dist.get_rank())
        if self.data_group.rank() > 0:
            first = checkpoint.load(dist.get_global_rank(self.data_group, 0))
            state |= {name: x for name, x in first.items() if name.startswith("model.")}
        return state

    def _mean_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of the tokens of sequences [b, s] that are not ignored."""
        counted = labels != IGNORED
        batch = map(self._to_device, (tokens, labels))
        losses = model.token_losses(self.distributed, *batch)
        if losses.dim():  # Megatron's heads have a loss where labels are ignored
            losses = losses.where(self._to_device(counted), 0.0)
        return losses.sum() / int(counted.sum())

    def _to_device(self, x: Tensor) -> Tensor:
        """Copy to the device, without waiting for it."""
        return x if self.device.type == "cpu" else x.pin_memory().to(self.device, non_blocking=True)


def run(config: RunConfig, corpus: Corpus, device: torch.device) -> int:
    """Train from wherever the run stands to ``config.steps``, then compare the heads; return 0.

    Raises ``RunError`` on every rank if one cannot go on, or a number is not finite.
    """
    with said("building the model"):
        trainer = Trainer(config, corpus, device)
        checkpoint = trainer.resume()
        head_mib = compare.head_peak_mib(trainer.head_alone(), is_ours=config.head.is_ours)
    log: RunLog | None = None

    def begin() -> None:
        nonlocal log
        origin = {
            **about(device),
            "ranks": dist.get_world_size(),
            "command": ["python", "-m", "flce_dist.launch.train", *sys.argv[1:]],
            "config": flatten(config),
        }
        write_json(config.out_dir / RUN, origin)
        log = RunLog(config.out_dir, step=trainer.step, steps=config.steps, head_mib=head_mib)
        if checkpoint is not None:
            log.say(f"continuing {checkpoint.path}")
        if trainer.step >= config.steps:
            done = f"the run has made {trainer.step} steps, and steps is {config.steps}"
            log.say(f"{done}: nothing is left to train")

    on_rank_0(begin)
    try:
        train(trainer, log)
    finally:
        if log:
            log.close()
    on_rank_0(lambda: log.check() if log else None)
    on_rank_0(lambda: plot_loss_curve(config.out_dir))
    compared = ""
    if config.compare and config.head.is_ours:
        numbers = compare.compare_heads(trainer.head_alone())
        on_rank_0(lambda: compare.report_comparison(config.out_dir, numbers))
        compared = ", the comparison of heads compare.png"
    if log:
        print(f"everything is in {config.out_dir}; the loss curve is loss.png{compared}")
    return 0


def train(trainer: Trainer, log: RunLog | None) -> None:
    """Make the steps that are left; ``log`` is rank 0's."""
    config = trainer.config
    tokens_per_step = trainer.samples_per_step * config.model.seq_length
    trainer.memory()  # of what comes from here on
    while trainer.step < config.steps:
        start = time.perf_counter()
        numbers = trainer.train_step()
        step_s = time.perf_counter() - start
        if log:
            log.train(
                trainer.step,
                **numbers,
                step_ms=step_s * 1e3,
                tokens_per_s=tokens_per_step / step_s,
                **trainer.memory(),
            )
        loss = numbers["loss"]
        norm = numbers["gradient_norm"]
        require_finite(trainer.step, {"loss": loss, "gradient norm": norm})
        last = trainer.step == config.steps
        if last or trainer.step % config.validate_every == 0:
            validation = trainer.validate()
            if log:
                log.validation(trainer.step, validation)
            require_finite(trainer.step, {"validation loss": validation})
        # After the records of this step, so that none of a saved step can be missing.
        if last or trainer.step % config.checkpoint_every == 0:
            on_rank_0(lambda: log.check() if log else None)
            trainer.save()


def require_finite(step: int, numbers: dict[str, float]) -> None:
    wrong = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if wrong:
        raise RunError(
            f"step {step}: {', '.join(wrong)}, so the run stops without a checkpoint of this step; "
            "the same command continues from the last one, and would come to the same numbers: "
            "change, in a new --out-dir, what they depend on, such as optimizer.lr"
        )
