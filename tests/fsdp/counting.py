"""Counts what a step does, below autograd: bytes that kernels copy, and the collectives in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Kernels that move values without computing any. Those of torch's FSDP2 are custom operators.
COPIES = {
    "aten": {
        "_chunk_cat",
        "_foreach_copy",
        "_foreach_copy_",
        "_to_copy",
        "cat",
        "clone",
        "contiguous",
        "copy",
        "copy_",
        "split_with_sizes_copy",
        "stack",
    },
    "fsdp": {"all_gather_copy_in", "chunk_cat", "split_with_sizes_copy"},
}


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _gathers_two(name: str, tensors: list[Tensor]) -> bool:
    """Whether two ranks exchange chunks of one buffer in place: what a broadcast from each would do."""
    one, other = (t.untyped_storage()._cdata for t in tensors[:2]) if name.startswith("alltoall") else (0, 1)
    return one == other


class Counted(TorchDispatchMode):
    """``copied[name]``: bytes written by copies. ``collectives``: (name, bytes of the message) in order of issue."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: Counter[str] = Counter()
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func.namespace, func._schema.name.split("::")[1]
        if namespace in ("c10d", "_c10d_functional"):
            tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
            if _gathers_two(name, tensors):
                self.collectives += [("broadcast_", _bytes(tensors[1:2]))] * 2
            else:
                # Of an all-to-all: what this rank sends; others may send it another number of bytes.
                sizes = [_bytes([t]) for t in (tensors[1:2] if name.startswith("alltoall") else tensors)]
                self.collectives.append((name, max(sizes, default=0)))
        result = func(*args, **kwargs)
        if name in COPIES.get(namespace, ()):
            self.copied[f"{namespace}.{name}"] += self._written(namespace, name, args, kwargs, result)
        return result

    @staticmethod
    def _written(namespace: str, name: str, args: Any, kwargs: Any, result: Any) -> int:
        if namespace == "fsdp":
            # all_gather_copy_in(inputs, output, ...) -> (slot, output); the two others fill out=.
            return _bytes(args[0]) if name == "all_gather_copy_in" else _bytes(tree_iter(kwargs["out"]))
        if name.startswith("_foreach_copy"):
            return _bytes(args[0])
        return _bytes(tree_iter(kwargs.get("out", result)))

    @property
    def copied_bytes(self) -> int:
        return sum(self.copied.values())

    def reductions(self, ranks: int) -> int:
        """Reductions of gradient buffers: on gloo each is an all-to-all, or two from three ranks on."""
        return sum(name.startswith("alltoall") for name, _ in self.collectives) // (1 if ranks == 2 else 2)

    def gathers(self, ranks: int, buffers: int = 1) -> float:
        """Gathers of parameter buffers: on gloo each is one broadcast per rank, or an exchange that counts as two."""
        return sum(name == "broadcast_" for name, _ in self.collectives) / ranks / buffers
