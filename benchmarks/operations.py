"""Counts what torch is asked to do: matrix products with their FLOPs and time, and elements that are moved about."""

import dataclasses
import time
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


# Operations whose last two arguments are the factors of a matrix product.
PRODUCTS = ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_")
# Operations that put numbers elsewhere and compute nothing.
MOVES = ("_to_copy", "cat", "clone", "copy_", "gather", "index", "index_select", "stack")


@dataclasses.dataclass
class Product:
    """One matrix product: the shapes of its factors, its FLOPs (two for a multiplication and an addition), seconds."""

    factors: tuple[torch.Size, torch.Size]
    flops: int
    seconds: float


class Operations(TorchDispatchMode):
    """
    Counts the operations in here, in the thread that entered it.

    `products` are the matrix products, `moves` name and result's shape of each operation of [`MOVES`], and `calls` the
    number of calls of each operation by name.
    """

    def __init__(self):
        super().__init__()
        self.products: list[Product] = []
        self.moves: list[tuple[str, torch.Size]] = []
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start = time.perf_counter()
        output = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if name in PRODUCTS:
            first, second = args[-2:]
            flops = 2 * first.numel() * second.shape[-1]
            self.products.append(Product((first.shape, second.shape), flops, seconds))
        elif name in MOVES:
            self.moves.append((name, output.shape))
        return output

    @property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)

    @property
    def product_seconds(self) -> float:
        return sum(product.seconds for product in self.products)


def matmul_rate(size: int = 1024, runs: int = 5) -> float:
    """FLOPs a second of this machine in the product of two square float32 matrices, at its fastest of some runs."""
    first, second = torch.randn(2, size, size)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        first @ second
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
