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
from torch.utils.data import DataLoader, random_split
from torchmetrics.text import Perplexity

from lightning_hpc.callbacks import StepTrace
from lightning_hpc.comm import CommStats
from lightning_hpc.trace import read_trace, summarize


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
        context = self.hparams["context"]
        # Consecutive windows of context + 1 bytes: the input, and the same shifted by one as its target.
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)
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
        return self.head(self.blocks(self.token(tokens.long()) + self.position.weight[: tokens.shape[1]]))

    def training_step(self, window: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(window[:, :-1]).flatten(0, 1), window[:, 1:].long().flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, window: Tensor, batch_idx: int) -> None:
        self.perplexity(self(window[:, :-1]), window[:, 1:].long())
        self.log("val_perplexity", self.perplexity, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class DemoCLI(LightningCLI):
    def after_fit(self) -> None:
        """Sums up what rank 0's trace says, if there is one."""
        traces = [callback.path for callback in self.trainer.callbacks if isinstance(callback, StepTrace)]
        if not traces or not self.trainer.is_global_zero:
            return
        summary, data = summarize(read_trace(traces[0]).records), self.datamodule.hparams
        tokens = summary.steps * self.trainer.world_size * data["batch_size"] * data["context"]
        print(f"\n{summary.render()}\n{tokens / summary.step_seconds:,.0f} tokens/s")
        for level, sent in getattr(self.trainer.strategy, "comm_stats", CommStats()).bytes_sent.items():
            print(f"rank 0 sent {sent / 1e6:,.1f} MB of gradients ({level})")
        print(f"trace: {traces[0]}")


if __name__ == "__main__":
    DemoCLI(LanguageModel, StandardLibrary, save_config_kwargs={"overwrite": True})
