"""A small CNN that reads handwritten digits (scikit-learn's bundled set), with validation and test accuracy.

python examples/digits.py --devices 2 --max-epochs 12
"""

import argparse

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_hpc  # noqa: F401  # registers strategy="hpc"
from lightning_hpc.callbacks import StepTrace


class Digits(LightningDataModule):
    """1,797 images of 8 x 8 pixels: 70 % to train on, 15 % to validate, 15 % to test."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(
            torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels, dtype=torch.long)
        )
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
        first, second = int(0.7 * len(data)), int(0.85 * len(data))
        self.train = Subset(data, order[:first])
        self.val = Subset(data, order[first:second])
        self.test = Subset(data, order[second:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=self.batch_size)


class DigitReader(LightningModule):
    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        self.val_accuracy = MulticlassAccuracy(10, average="micro")
        self.test_accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.val_accuracy(self.network(batch[0]), batch[1])
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.test_accuracy(self.network(batch[0]), batch[1])
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, default=2, help="processes to train with (default: %(default)s)")
    parser.add_argument("--max-epochs", type=int, default=12, help="passes over the data (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="images a step and process (default: %(default)s)")
    parser.add_argument("--strategy", default="hpc", help="Lightning strategy (default: %(default)s)")
    arguments = parser.parse_args()

    seed_everything(1)
    trace = StepTrace()
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=arguments.strategy,
        max_epochs=arguments.max_epochs,
        default_root_dir="runs/digits",
        logger=False,
        callbacks=[trace, ModelCheckpoint("runs/digits/checkpoints", monitor="val_accuracy", mode="max")],
    )
    model, data = DigitReader(), Digits(arguments.batch_size)
    trainer.fit(model, data)
    trainer.test(model, data)
    if trainer.is_global_zero:
        print(f"trace: {trace.path}")


if __name__ == "__main__":
    main()
