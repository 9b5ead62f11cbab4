"""What a codec is: it packs a sum of gradients for the slow level, and unpacks what the other nodes have packed.

There are three kinds, by what travels:

- a `BlockCodec` packs fixed blocks of numbers into a fixed number of bytes. Its packets cross twice: to the rank that
  sums them, and from there, packed again, to all. To write your own, subclass this one.
- a `SparseCodec` picks some numbers and drops the rest. Every node's packet goes to every other node.
- a `LinearCodec` maps numbers to fewer numbers which may be summed before they are mapped back.

What a codec loses is kept by the caller and added to the next step's gradients (error feedback: Seide et al. 2014,
Karimireddy et al. 2019), so a codec itself only encodes and decodes. It sees finite fp32 values only: other dtypes, and
gradients with NaN or inf, are sent uncompressed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """A run of whole rows of one parameter within the values that a codec is given.

    Attributes:
        name: The parameter's name in the module.
        start: Index of the first element in the flattened parameter.
        rows: Number of rows: indices of the parameter's first dimension.
        columns: Elements a row.
    """

    name: str
    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class Codec(ABC):
    """Base of the three kinds.

    Attributes:
        name: Name in statistics and in the log.
    """

    name: str


class BlockCodec(Codec):
    """Packs each block of numbers into the same number of bytes, independently of all other blocks.

    Attributes:
        block: Numbers in a block.
        block_bytes: Bytes that a block is packed into.
        preconditioned: Whether each number is divided by its usual magnitude before it is packed (see `Preconditioner`
            in `lightning_hpc.comm.preconditioner`). For codecs of few bits, which must decode zeros to zeros then.
    """

    block: int
    block_bytes: int
    preconditioned: bool = False

    @abstractmethod
    def encode(self, blocks: Tensor) -> Tensor:
        """Packs fp32 ``[n, block]`` into uint8 ``[n, block_bytes]``. All-zero blocks must decode to zeros."""

    @abstractmethod
    def decode(self, packed: Tensor) -> Tensor:
        """Unpacks uint8 ``[n, block_bytes]`` into fp32 ``[n, block]``."""


class SparseCodec(Codec):
    """Packs the numbers that it picks; all others count as zero."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor | None:
        """Packs fp32 ``[n]`` into uint8 of any length, or None where the values are too dense for this to pay."""

    @abstractmethod
    def decode(self, packed: Tensor, numel: int) -> Tensor:
        """Unpacks uint8 into fp32 ``[numel]``."""


class LinearCodec(Codec):
    """Maps values to a shorter message, by a linear map that is the same on all nodes, so that messages may be summed.

    The map may change from step to step: `advance` is called with each sum, which all nodes have alike.
    """

    @abstractmethod
    def encode(self, values: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Maps fp32 ``[n]``, made up of ``segments``, to an fp32 message whose length is the same on all nodes."""

    @abstractmethod
    def decode(self, message: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Maps a message, or a sum of messages, back to fp32 ``[n]``."""

    @abstractmethod
    def advance(self, message: Tensor, segments: Sequence[Segment]) -> None:
        """Takes the sum of all nodes' messages of this step; what it holds may choose the next step's map."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """What the next step's map depends on, as plain tensors; keys hold parameter names."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` gave."""
