"""The training loop: how a run begins, continues and ends."""

import signal
import time

import torch

from flce_dist.launch.program import RunError
from flce_dist.launch.train.compare import compare_heads, print_table, write_comparison
from flce_dist.launch.train.config import RunConfig
from flce_dist.launch.train.data import Corpus
from flce_dist.launch.train.log import RunLog, plot_loss_curve, write_origin
from flce_dist.launch.train.ranks import on_rank_0, said, together
from flce_dist.launch.train.trainer import Trainer, require_finite


def run(config: RunConfig, corpus: Corpus, device: torch.device) -> int:
    """Train from wherever the run stands to ``config.steps``, then compare the heads.

    SIGTERM to any rank ends all after the step that they are in, with a checkpoint. A second one
    ends at once.

    Returns:
        The exit status: 0, or 143 after SIGTERM.

    Raises:
        RunError: on every rank, if one cannot go on, or a number is not finite.
    """
    with said("building the model"):
        trainer = Trainer(config, corpus, device)
        checkpoint = trainer.resume()
        head_mib = trainer.head_peak_mib()
    log: RunLog | None = None

    def begin() -> None:
        nonlocal log
        write_origin(config, device)
        log = RunLog(config.out_dir, step=trainer.step, steps=config.steps, head_mib=head_mib)
        if checkpoint is not None:
            log.say(f"continuing {checkpoint.path}")

    def end() -> bool:
        if log:
            log.close()
        return bool(terminations)

    def require_all_finite(numbers: dict[str, float]) -> None:
        try:
            require_finite(trainer.step, numbers)
        except RunError:
            together(end)  # the numbers are the same on every rank
            raise

    on_rank_0(begin)
    terminations: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: terminations.append(number))
    tokens_per_step = trainer.samples_per_step * config.model.seq_length
    trainer.memory()  # of what comes from here on
    while trainer.step < config.steps and not trainer.stopping:
        start = time.perf_counter()
        failed = log is not None and log.failure is not None
        loss, norm = trainer.train_step(stop=failed or bool(terminations))
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
        require_all_finite({"loss": loss, "gradient norm": norm})
        last = trainer.step == config.steps
        if trainer.stopping:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if last or trainer.step % config.validate_every == 0:
            validation = trainer.validate()
            if log:
                log.validation(trainer.step, validation)
            require_all_finite({"validation loss": validation})
        # After the records of this step, so that none of a saved step can be missing.
        if last or trainer.stopping or trainer.step % config.checkpoint_every == 0:
            try:
                trainer.save()
            except RunError:
                if log:
                    log.leave_bar()
                raise

    stopped = any(together(end))
    # torchrun sends SIGTERM to all at the first exit; after a stop that must not change the status.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stopped else signal.SIG_DFL)
    if stopped:
        if log:
            print(f"SIGTERM: stopped after step {trainer.step}; the same command continues the run")
        return 128 + signal.SIGTERM
    on_rank_0(lambda: plot_loss_curve(config.out_dir))
    if config.compare and trainer.is_ours:
        numbers = compare_heads(trainer.model, *trainer.probe_batch(), trainer.groups.tensor)
        if log:
            print_table(numbers)
            write_comparison(config.out_dir, numbers)
    if log:
        print(f"everything is in {config.out_dir}; the loss curve is loss.png")
    return 0
