"""A task that waits for its data: large crops of photos as uint8, and a model that looks at few of their pixels."""

from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

SIDE = 384
STRIDE = 16


class Crops(Dataset[tuple[Tensor, int]]):
    """Crops of scikit-learn's two photos: 3 x 384 x 384 uint8, 442 kB each. The class is the photo and the half.

    Args:
        first: Seed of the first crop; crop ``index`` is always the same.
        length: How many.
    """

    def __init__(self, first: int, length: int) -> None:
        self.photos = [torch.tensor(image).permute(2, 0, 1).contiguous() for image in load_sample_images().images]
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        number = int(torch.randint(2, (), generator=generator))
        photo = self.photos[number]
        top = int(torch.randint(photo.shape[1] - SIDE, (), generator=generator))
        left = int(torch.randint(photo.shape[2] - SIDE, (), generator=generator))
        crop = photo[:, top : top + SIDE, left : left + SIDE].contiguous()
        return crop, 2 * number + int(2 * left > photo.shape[2] - SIDE)


class PhotoData(pl.LightningDataModule):
    """Batches of both splits."""

    def __init__(self, batch_size: int, length: int, num_workers: int) -> None:
        super().__init__()
        self.batch_size, self.length, self.num_workers = batch_size, length, num_workers

    def train_dataloader(self) -> Any:
        """Returns the training loader."""
        data = Crops(0, self.length)
        return DataLoader(data, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers, drop_last=True)

    def val_dataloader(self) -> Any:
        """Returns the validation loader."""
        return DataLoader(Crops(10**6, 128), batch_size=self.batch_size)


class PhotoReader(pl.LightningModule):
    """A perceptron on every sixteenth pixel."""

    def __init__(self) -> None:
        super().__init__()
        pixels = 3 * (SIDE // STRIDE) ** 2
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 4))
        self.accuracy = MulticlassAccuracy(4, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        """Classes of a batch."""
        logits: Tensor = self.network(x[:, :, ::STRIDE, ::STRIDE].float() / 255)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns a loss."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Counts what is right."""
        self.accuracy(self(batch[0]), batch[1])
        self.log("metric", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
