"""The CUDA side of the schedule: two communication streams beside the compute stream; nothing at all on CPU.

Memory is handed between streams by the events of ``ragged_shard.pool``, never by ``record_stream``, so the allocator's
peak does not depend on timing:

    gather   slot write and all-gather. Waits for the compute stream once per iteration (the optimizer's writes) and for
    the
             event of the memory block it gathers into.
    reduce   reduce-scatter and the division. Waits for the compute stream when a bucket's gradients are complete.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["CommStreams"]


class CommStreams:
    """``gather`` and ``reduce`` streams of one device; ``None`` on CPU, where collectives run on gloo's threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gather: torch.Stream | None = None
        self.reduce: torch.Stream | None = None
        # What the next iteration's gathers wait for, instead of the compute stream.
        self.optimizer_event: torch.Event | None = None
        if device.type != "cpu":
            self.gather = torch.Stream(device=device)
            self.reduce = torch.Stream(device=device)

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Make ``stream`` current."""
        return nullcontext() if stream is None else stream

    def after_compute(self, stream: torch.Stream | None) -> None:
        """Let ``stream`` wait for what the current (compute) stream has been given so far."""
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(self.device))

    def after_optimizer(self) -> None:
        """Let gathers wait for the optimizer's writes: its event if there is one, else all that compute was given."""
        event, self.optimizer_event = self.optimizer_event, None
        if self.gather is None:
            return
        if event is None:
            self.after_compute(self.gather)
        else:
            self.gather.wait_event(event)

    def compute_waits(self, stream: torch.Stream | None) -> None:
        """Let the current (compute) stream wait for ``stream``."""
        if stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(stream)
