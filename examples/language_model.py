"""A byte-level GPT that learns to write Python, from the source files of the standard library on this machine.

python examples/language_model.py fit --config examples/language_model.yaml
python examples/language_model.py fit --config examples/language_model.yaml --trainer.strategy=ddp --model.width=128
"""

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset, random_split
from torchmetrics.text import Perplexity

from lightning_hpc.callbacks import StepTrace
from lightning_hpc.strategies import HPCStrategy
from lightning_hpc.trace import read_trace, summarize


class Windows(Dataset[Tensor]):
    """Consecutive windows of ``length + 1`` bytes: the input, and the same shifted by one as its target."""

    def __init__(self, data: Tensor, length: int) -> None:
        self.data, self.length = data, length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.data[start : start + self.length + 1].long()


class StandardLibrary(LightningDataModule):
    """Python's own modules as bytes.

    Args:
        context: Bytes a sample.
        batch_size: Samples a batch on each rank.
    """

    def __init__(self, context: int = 128, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)
        windows = Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8), self.hparams["context"])
        self.train, self.val = random_split(windows, [0.98, 0.02], generator=torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, batch_size=self.hparams["batch_size"], shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val, batch_size=self.hparams["batch_size"])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class LanguageModel(LightningModule):
    """A GPT over bytes; 3.3 million parameters by default.

    Args:
        width: Size of the hidden state.
        depth: Number of blocks.
        heads: Attention heads a block.
        context: Longest input, in bytes.
        lr: Peak learning rate of AdamW, reached after 20 steps.
    """

    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4, context: int = 128, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        for weight in (parameter for parameter in self.parameters() if parameter.dim() > 1):
            nn.init.normal_(weight, std=0.02)
        self.perplexity = Perplexity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]]))

    def training_step(self, window: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, window: Tensor, batch_idx: int) -> None:
        self.perplexity(self(window[:, :-1]), window[:, 1:])
        self.log("val_perplexity", self.perplexity, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class DemoCLI(LightningCLI):
    def after_fit(self) -> None:
        """Sums the run up from rank 0's trace, if there is one."""
        trace = next((callback for callback in self.trainer.callbacks if isinstance(callback, StepTrace)), None)
        if trace is None or trace.path is None or not self.trainer.is_global_zero:
            return
        summary = summarize(read_trace(trace.path).records)
        tokens = summary.steps * self.datamodule.hparams["batch_size"] * self.datamodule.hparams["context"]
        seconds = summary.steps_seconds
        print(f"\n{summary.render()}\n{tokens * self.trainer.world_size / seconds:,.0f} tokens/s")
        if isinstance(self.trainer.strategy, HPCStrategy):
            for level, sent in self.trainer.strategy.comm_stats.bytes_sent.items():
                print(f"rank 0 sent {sent / 1e6:,.1f} MB of gradients, {level}")
        print(f"trace: {trace.path}")


if __name__ == "__main__":
    DemoCLI(LanguageModel, StandardLibrary, save_config_kwargs={"overwrite": True})
