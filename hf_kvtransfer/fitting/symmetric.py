"""A symmetric matrix too wide to be held twice: made block by block, and factored block by block."""

from collections.abc import Callable, Iterator, Sequence

import torch


# Of the blocks that a matrix is cut into where it comes in one piece.
_BLOCK_WIDTH = 2048


class SymmetricBlocks:
    """
    A symmetric matrix of which one block at a time is there.

    Args:
        widths (`Sequence[int]`):
            Rows, and columns, of the blocks.
        block (`Callable[[int, int], torch.Tensor]`):
            Makes a block `[widths[i], widths[j]]` of float64 numbers, each time a new one.
    """

    def __init__(self, widths: Sequence[int], block: Callable[[int, int], torch.Tensor]):
        self.widths, self._block = list(widths), block
        starts = [0]
        for width in self.widths:
            starts.append(starts[-1] + width)
        self.rows = [slice(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "SymmetricBlocks":
        """A matrix that is there, `[size, size]`."""
        parts = torch.arange(len(matrix)).split(_BLOCK_WIDTH)
        rows = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
        return cls([len(part) for part in parts], lambda i, j: matrix[rows[i], rows[j]].clone())

    def __len__(self) -> int:
        return sum(self.widths)

    def diagonal(self) -> torch.Tensor:
        """`[size]`."""
        return torch.cat([self._block(i, i).diagonal() for i in range(len(self.widths))])

    def dense(self) -> torch.Tensor:
        """All of it, a new tensor `[size, size]`."""
        matrix = torch.empty(len(self), len(self), dtype=torch.float64)
        for i, rows in enumerate(self.rows):
            for j, columns in enumerate(self.rows[: i + 1]):
                block = self._block(i, j)
                matrix[rows, columns] = block
                matrix[columns, rows] = block.T
        return matrix

    def select(self, index: torch.Tensor) -> "SymmetricBlocks":
        """The matrix of some rows, and the same columns."""
        own = [((index >= rows.start) & (index < rows.stop)).nonzero()[:, 0] for rows in self.rows]
        matrix = torch.empty(len(index), len(index), dtype=torch.float64)
        for i, rows in enumerate(self.rows):
            for j, columns in enumerate(self.rows[: i + 1]):
                block = self._block(i, j)[index[own[i]] - rows.start][:, index[own[j]] - columns.start]
                matrix[own[i][:, None], own[j]] = block
                matrix[own[j][:, None], own[i]] = block.T
        return SymmetricBlocks.of(matrix)

    def times(self, right: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """The product with `right` `[size, columns]`, some rows at a time: which, and `[rows, columns]`."""
        for i, rows in enumerate(self.rows):
            product = right.new_zeros(self.widths[i], right.shape[1])
            for j, columns in enumerate(self.rows):
                product.addmm_(self._block(i, j), right[columns])
            yield rows, product

    def cholesky(self, scale: torch.Tensor, strength: float) -> "BlockCholesky | None":
        """
        The factor of the matrix in units of `scale`, with `strength` added to its diagonal.

        Args:
            scale (`torch.Tensor`):
                `[size]`, what rows and columns are divided by.
            strength (`float`):
                The penalty.

        Returns:
            [`BlockCholesky`], *optional*: `None` if that is not positive definite.
        """
        blocks: dict[tuple[int, int], torch.Tensor] = {}
        for j, columns in enumerate(self.rows):
            for i in range(j, len(self.rows)):
                block = self._block(i, j).div_(scale[self.rows[i], None]).div_(scale[columns])
                if i == j:
                    block.diagonal().add_(strength)
                for k in range(j):
                    block.addmm_(blocks[i, k], blocks[j, k].T, alpha=-1)
                if i > j:
                    blocks[i, j] = torch.linalg.solve_triangular(blocks[j, j].T, block, upper=True, left=False)
                    continue
                blocks[j, j], failed = torch.linalg.cholesky_ex(block)
                if failed:
                    return None
        return BlockCholesky(self.rows, blocks)


class BlockCholesky:
    """
    A lower triangular factor, of which nothing above the diagonal blocks is held.

    Args:
        rows (`Sequence[slice]`):
            Rows of the blocks.
        blocks (`dict[tuple[int, int], torch.Tensor]`):
            Those on and below the diagonal.
    """

    def __init__(self, rows: Sequence[slice], blocks: dict[tuple[int, int], torch.Tensor]):
        self._rows, self._blocks = rows, blocks

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """What the factored matrix takes to `right`, `[size, columns]`, a new tensor."""
        solution, number = right.clone(), len(self._rows)
        parts = [solution[rows] for rows in self._rows]
        for i in range(number):
            for k in range(i):
                parts[i].addmm_(self._blocks[i, k], parts[k], alpha=-1)
            parts[i].copy_(torch.linalg.solve_triangular(self._blocks[i, i], parts[i], upper=False))
        for i in reversed(range(number)):
            for k in range(i + 1, number):
                parts[i].addmm_(self._blocks[k, i].T, parts[k], alpha=-1)
            parts[i].copy_(torch.linalg.solve_triangular(self._blocks[i, i].T, parts[i], upper=True))
        return solution
