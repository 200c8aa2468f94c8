"""First and second moments of named blocks of columns, accumulated batch by batch."""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .processes import Processes
from .symmetric import SymmetricBlocks


class Moments:
    """
    Sums over rows that every least-squares question about the blocks can be answered from.

    Memory depends on the widths of the blocks only. Products are taken in `dtype` on rows shifted by the first batch's
    mean, so that no digits are lost to a large mean, and summed in float64.

    Args:
        pairs (`Iterable[tuple[Hashable, Hashable]]`):
            Pairs of blocks whose products are summed. Within `(a, b)` the order does not matter.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Of the products of one batch.
    """

    def __init__(self, pairs: Iterable[tuple[Hashable, Hashable]], dtype: torch.dtype = torch.float32):
        self.pairs = list(dict.fromkeys(pairs))
        self.blocks = list(dict.fromkeys(itertools.chain.from_iterable(self.pairs)))
        self.dtype = dtype
        self.count = 0
        self._shift: dict[Hashable, torch.Tensor] = {}
        self._sum: dict[Hashable, torch.Tensor] = {}
        self._square: dict[Hashable, torch.Tensor] = {}
        self._product: dict[tuple[Hashable, Hashable], torch.Tensor] = {}

    @torch.no_grad()
    def add(self, rows: Mapping[Any, torch.Tensor]) -> None:
        """
        Args:
            rows (`Mapping[Hashable, torch.Tensor]`):
                For each block `[rows, width]`, the same rows in every block. Blocks in no pair are left alone.
        """
        shifted = {}
        for name in self.blocks:
            block = rows[name].to(self.dtype)
            if name not in self._shift:
                self._shift[name] = block.mean(0)
                self._sum[name] = torch.zeros(block.shape[1], dtype=torch.float64)
                self._square[name] = torch.zeros(block.shape[1], dtype=torch.float64)
            block = block - self._shift[name].to(block.device)
            self._sum[name] += block.sum(0, dtype=torch.float64).cpu()
            self._square[name] += block.square().sum(0, dtype=torch.float64).cpu()
            shifted[name] = block
        for pair in self.pairs:
            product = (shifted[pair[0]].T @ shifted[pair[1]]).cpu()
            if pair in self._product:
                self._product[pair] += product
            else:
                self._product[pair] = product.double().contiguous()
        self.count += len(next(iter(rows.values())))

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that was summed, as named tensors: what [`Moments.load`] takes."""
        tensors = {"count": torch.tensor(self.count)}
        for number, name in enumerate(self.blocks if self.count else []):
            tensors |= {f"shift.{number}": self._shift[name].cpu(), f"sum.{number}": self._sum[name]}
            tensors[f"square.{number}"] = self._square[name]
        for number, pair in enumerate(self.pairs if self.count else []):
            tensors[f"product.{number}"] = self._product[pair]
        return tensors

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from the [`Moments.state`] of sums over the same pairs."""
        self.count = int(state["count"])
        for number, name in enumerate(self.blocks if self.count else []):
            self._shift[name], self._sum[name], self._square[name] = (
                state[f"{what}.{number}"].clone() for what in ("shift", "sum", "square")
            )
        for number, pair in enumerate(self.pairs if self.count else []):
            self._product[pair] = state[f"product.{number}"].clone()

    @torch.no_grad()
    def reduce(self, processes: Processes) -> None:
        """Take in what the other processes have summed over the same pairs. Afterwards each has the sums of all."""
        if processes.count == 1:
            return
        known = processes.gather({name: (len(part), self._shift[name].dtype) for name, part in self._sum.items()})
        widths = next((part for part in known if part), None)
        if widths is None:  # nobody has read anything
            return
        count = int(processes.sum(torch.tensor(self.count)))
        offset = {}
        for name, (width, dtype) in widths.items():
            zeros = torch.zeros(width, dtype=torch.float64)
            shift = self._shift[name].double().cpu() if self.count else zeros
            total = self._sum[name] if self.count else zeros
            # The mean of all rows takes the place of that of the first batch, in every process the same.
            mean = (processes.sum(total + self.count * shift) / count).to(dtype)
            offset[name] = shift - mean.double()
            square = self._square[name] + 2 * offset[name] * total if self.count else zeros
            self._square[name] = processes.sum(square + self.count * offset[name].square())
            self._shift[name] = mean
        for a, b in self.pairs:
            if self.count:
                product = self._product[a, b]
                product.addr_(offset[a], self._sum[b]).addr_(self._sum[a], offset[b])
                product.addr_(offset[a], offset[b], alpha=self.count)
            else:
                product = torch.zeros(widths[a][0], widths[b][0], dtype=torch.float64)
            self._product[a, b] = processes.sum(product)
        for name, (width, _) in widths.items():
            total = self._sum[name] if self.count else torch.zeros(width, dtype=torch.float64)
            self._sum[name] = processes.sum(total + self.count * offset[name])
        self.count = count

    def width(self, blocks: Sequence[Hashable]) -> int:
        """Number of columns of the blocks."""
        return sum(len(self._sum[name]) for name in blocks)

    def mean(self, blocks: Sequence[Hashable]) -> torch.Tensor:
        """Mean of the blocks' columns, `[width]`."""
        return torch.cat([self._sum[name] / self.count + self._shift[name].double().cpu() for name in blocks])

    def variance(self, blocks: Sequence[Hashable]) -> torch.Tensor:
        """Variance of the blocks' columns, `[width]`."""
        return torch.cat(
            [self._square[name] / self.count - (self._sum[name] / self.count).square() for name in blocks]
        ).clamp(min=0)

    def covariance(self, first: Sequence[Hashable], second: Sequence[Hashable]) -> torch.Tensor:
        """Covariance of two lists of blocks, `[width of first, width of second]`."""
        return torch.cat([torch.cat([self._covariance(a, b) for b in second], dim=1) for a in first])

    def covariance_blocks(self, names: Sequence[Hashable]) -> SymmetricBlocks:
        """Covariance of the blocks' columns, of which only the sums are held."""
        return SymmetricBlocks(
            [self.width([name]) for name in names], lambda i, j: self._covariance(names[i], names[j])
        )

    def _covariance(self, a: Hashable, b: Hashable) -> torch.Tensor:
        product = self._product[a, b] if (a, b) in self._product else self._product[b, a].T
        return torch.addr(product, self._sum[a], self._sum[b], beta=1 / self.count, alpha=-1 / self.count**2)
