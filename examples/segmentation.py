"""A small U-Net that finds digits in noise, and tells even from odd ones, with the parts that save memory.

python examples/segmentation.py --max-epochs 2 --plain
python examples/segmentation.py --max-epochs 2
"""

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex

from lightning_hpc.callbacks import ActivationCheckpointing, MemoryMonitor, StepTrace


class DigitsInNoise(Dataset[tuple[Tensor, Tensor]]):
    """Images of 64 x 64 pixels: four of scikit-learn's digits, three times as large, at random places in noise.

    A pixel's class is 0 outside, 1 in even digits, 2 in odd ones, where a digit is brighter than a third. Image
    ``index`` is always the same.
    """

    def __init__(self, first: int, length: int) -> None:
        images, self.labels = load_digits(return_X_y=True)
        self.images = F.interpolate(torch.tensor(images).view(-1, 1, 8, 8).float() / 16, scale_factor=3.0)[:, 0]
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        image = 0.3 * torch.rand(1, 64, 64, generator=generator)
        mask = torch.zeros(64, 64, dtype=torch.long)
        for number in torch.randint(len(self.images), (4,), generator=generator).tolist():
            top, left = torch.randint(40, (2,), generator=generator).tolist()
            image[0, top : top + 24, left : left + 24] += self.images[number]
            mask[top : top + 24, left : left + 24][self.images[number] > 1 / 3] = 1 + self.labels[number] % 2
        return image, mask


class Scenes(LightningDataModule):
    def __init__(self, batch_size: int = 8, length: int = 512) -> None:
        super().__init__()
        self.batch_size, self.length = batch_size, length

    def train_dataloader(self) -> Any:
        return DataLoader(DigitsInNoise(0, self.length), batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        return DataLoader(DigitsInNoise(10**6, 64), batch_size=self.batch_size)


class Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        convolutions = (nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1))
        super().__init__(*(layer for each in convolutions for layer in (each, nn.BatchNorm2d(outputs), nn.ReLU())))


class UNet(LightningModule):
    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.down = nn.ModuleList([Double(1, width), Double(width, 2 * width), Double(2 * width, 4 * width)])
        self.up = nn.ModuleList([Double(6 * width, 2 * width), Double(3 * width, width)])
        self.head = nn.Conv2d(width, 3, 1)
        self.iou = MulticlassJaccardIndex(3)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if skipped else x)
            skipped.append(x)
        for block, skip in zip(self.up, skipped[-2::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.iou(self(batch[0]), batch[1])
        self.log("iou", self.iou, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--max-epochs", type=int, default=4, help="passes over the data (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="images a step (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="without the parts that save memory")
    arguments = parser.parse_args()

    seed_everything(1)
    saving = [] if arguments.plain else [ActivationCheckpointing(budget=0.6)]
    memory = MemoryMonitor()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=arguments.max_epochs,
        default_root_dir="runs/segmentation",
        logger=False,
        callbacks=[StepTrace(), memory, *saving],
    )
    trainer.fit(UNet(), Scenes(arguments.batch_size))
    print(f"iou {trainer.callback_metrics['iou']:.3f}, up to {(memory.peak_bytes or 0) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
