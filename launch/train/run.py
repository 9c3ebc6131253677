"""The training loop: how a run begins, continues and ends."""

import math
import time

import torch

from flce_dist.launch.program import RunError
from flce_dist.launch.train.compare import compare_heads, head_peak_mib, report_comparison
from flce_dist.launch.train.config import RunConfig
from flce_dist.launch.train.data import Corpus
from flce_dist.launch.train.log import RunLog, plot_loss_curve, write_origin
from flce_dist.launch.train.ranks import on_rank_0, said
from flce_dist.launch.train.trainer import Trainer


def run(config: RunConfig, corpus: Corpus, device: torch.device) -> int:
    """Train from wherever the run stands to ``config.steps``, then compare the heads.

    Returns:
        The exit status, 0.

    Raises:
        RunError: on every rank, if one cannot go on, or a number is not finite.
    """
    with said("building the model"):
        trainer = Trainer(config, corpus, device)
        checkpoint = trainer.resume()
        head_mib = head_peak_mib(trainer.head_alone(), config.head.is_ours)
    log: RunLog | None = None

    def begin() -> None:
        nonlocal log
        write_origin(config, device)
        log = RunLog(config.out_dir, step=trainer.step, steps=config.steps, head_mib=head_mib)
        if checkpoint is not None:
            log.say(f"continuing {checkpoint.path}")

    on_rank_0(begin)
    try:
        train(trainer, log)
    finally:
        if log:
            log.close()
    on_rank_0(lambda: plot_loss_curve(config.out_dir))
    compared = ""
    if config.compare and config.head.is_ours:
        numbers = compare_heads(trainer.head_alone())
        on_rank_0(lambda: report_comparison(config.out_dir, numbers))
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
        loss, norm = trainer.train_step()
        step_s = time.perf_counter() - start
        if log:
            log.train(
                trainer.step,
                loss=loss,
                gradient_norm=norm,
                step_ms=step_s * 1e3,
                tokens_per_s=tokens_per_step / step_s,
                **trainer.filtered,
                **trainer.memory(),
            )
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
