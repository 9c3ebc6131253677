#!/usr/bin/env bash
# lightning 2.6.6: with EMAWeightAveraging (and WeightAveraging) trainer.test and trainer.predict of
# a checkpoint, after trainer.fit of the same trainer, use the last weights of training, not the
# averaged ones: loading puts the former into the model, and only validation swaps them. So the test
# score is of another model than validation's of the same checkpoint, and than that of a new
# trainer, whose state_dict is the average. No error, no warning of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 lightning==2.6.6
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")  # of workers of the loader and the like
folder = sys.argv[1]


class Model(lightning.LightningModule):
    """A model whose weight grows by 1 in each step, and whose score is its weight."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.linear.weight)

    def training_step(self, batch, index):
        return -self.linear(batch[0]).mean()

    def validation_step(self, batch, index):
        self.log("score", self.linear.weight.item())

    test_step = validation_step

    def predict_step(self, batch, index):
        return self.linear.weight.item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def make_trainer():
    return lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[EMAWeightAveraging(decay=0.5), ModelCheckpoint(folder)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def scores(trainer, path):
    model = Model()
    options = {"ckpt_path": path, "weights_only": True}
    return {
        "validate": trainer.validate(model, loader, verbose=False, **options)[0]["score"],
        "test": trainer.test(model, loader, verbose=False, **options)[0]["score"],
        "predict": trainer.predict(model, loader, **options)[0],
    }


loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
trainer = make_trainer()
trainer.fit(Model(), loader, loader)
path = trainer.checkpoint_callback.best_model_path
checkpoint = torch.load(path, weights_only=True)
averaged = checkpoint["state_dict"]["linear.weight"].item()
last = checkpoint["current_model_state"]["linear.weight"].item()
print(f"weight in the checkpoint: averaged {averaged}, last {last}")
of_same, of_new = scores(trainer, path), scores(make_trainer(), path)
print(f"of the checkpoint, by the trainer of fit: {of_same}")
print(f"of the checkpoint, by a new trainer:      {of_new}")
is_as_described = averaged != last
is_as_described &= of_same == {"validate": averaged, "test": last, "predict": last}
is_as_described &= of_new == {"validate": averaged, "test": averaged, "predict": averaged}
sys.exit(0 if is_as_described else "test of a checkpoint now uses its averaged weights")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder"
