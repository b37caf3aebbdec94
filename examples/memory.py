"""Bytes that lie in memory on this rank: of tensors, exactly; and the peak, from the allocator's own record."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PROFILED_STEPS = 3


def resident_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages under ``tensors`` (of DTensors: what lies here, with a flat buffer's padding)."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class PeakMemory:
    """The most bytes allocated at once on this rank in one training step.

    On CUDA: ``torch.cuda.max_memory_allocated``. On the CPU, where torch keeps no count, every allocation since
    ``PeakMemory()`` is recorded by the profiler, and the peak is that of the last of the first ``PROFILED_STEPS``
    steps; nothing is recorded after that, so later steps run at full speed. What another thread than ours frees, as
    gloo does with staging buffers of FSDP2's collectives, counts as still there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self.bytes, self.began = device, 0, 0, 0
        self.record: torch.autograd.profiler.profile | None = None
        if device.type == "cpu":
            self.record = torch.autograd.profiler.profile(profile_memory=True)
            self.record.__enter__()
            atexit.register(self.close)  # an interpreter that ends while it records crashes

    @property
    def recording(self) -> bool:
        """Whether steps are slowed down at the moment."""
        return self.record is not None

    def step_begins(self) -> None:
        self.steps += 1
        self.began = time.time_ns()
        if self.device.type == "cuda" and self.steps == 1:
            torch.cuda.reset_peak_memory_stats(self.device)

    def step_ends(self) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        elif self.record is not None and self.steps == PROFILED_STEPS:
            record = self.close()
            events = [event for event in record.kineto_results.events() if event.name() == "[memory]"]
            live = 0
            for event in sorted(events, key=lambda event: event.start_ns()):
                live += event.nbytes()
                if event.start_ns() >= self.began:
                    self.bytes = max(self.bytes, live)

    def close(self) -> Any:
        """Record no longer."""
        record, self.record = self.record, None
        if record is not None:
            record.__exit__(None, None, None)
        return record
