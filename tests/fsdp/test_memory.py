"""Communication memory is known: the pool grows in the first step alone, every step reads the same in the ledger, and
``memory_report`` predicts what lies in memory.
"""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import MixedPrecisionPolicy, fully_shard, memory_report
from fsdp.hooks import state_of
from tests import cluster
from tests.fsdp.modules import Optional, Stack, data, squares


def stack(depth: int = 3, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(depth)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def pool_of(model: nn.Module) -> Any:
    return state_of(model).bucket.pool


def rest(model: nn.Module) -> tuple[int, dict[str, int]]:
    ledger = pool_of(model).ledger
    return ledger.in_use, {label: n for label, n in ledger.by_label.items() if n}


def ledgers(steps: int = 5, twice: bool = False, checkpointed: bool = False, **options: Any) -> list[tuple]:
    """After every step: (grown, held, peak, in use, acquisitions of that step)."""
    model = stack(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen, before = [], 0
    for step in range(steps):
        if checkpointed:
            x = data(step)
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            loss = x.square().mean()
        else:
            loss = squares(model, step)
        if twice:
            loss = loss + squares(model, step + 50)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ledger = pool_of(model).ledger
        seen.append((ledger.grown, ledger.held, ledger.peak_in_use, ledger.in_use, ledger.acquired - before))
        before = ledger.acquired
    return seen


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_the_pool_does_not_grow_after_the_first_step(reshard_after_forward: bool | None) -> None:
    for seen in cluster.run(2, ledgers, reshard_after_forward=reshard_after_forward):
        # `None` learns in the first step which bucket backward starts with, and acts on it from the second on.
        settled = 2 if reshard_after_forward is None else 1
        assert [grown for grown, *_ in seen[settled - 1 :]] == [seen[settled - 1][0]] * (6 - settled)
        assert len({tuple(s) for s in seen[settled:]}) == 1
        assert all(in_use == 0 for _, _, _, in_use, _ in seen)


@pytest.mark.parametrize("options", [{"twice": True}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}])
def test_other_schedules_settle_too(options: dict[str, Any]) -> None:
    for seen in cluster.run(2, ledgers, reshard_after_forward=True, **options):
        assert len({tuple(s) for s in seen[1:]}) == 1
        assert seen[0][0] == seen[-1][0] and seen[-1][3] == 0


def test_resharding_holds_fewer_buffers_than_keeping() -> None:
    """Two gathered blocks at once (one computes, the next is on its way), not all of them."""
    peaks = {
        (keep, depth): cluster.run(2, ledgers, depth=depth, reshard_after_forward=not keep)[0][-1][2]
        for keep in (False, True)
        for depth in (6, 12)
    }
    # However deep the model is.
    assert peaks[False, 6] == peaks[False, 12] < peaks[True, 6] < peaks[True, 12]


def shards_and_report(world: int, **options: Any) -> list[str]:
    """What the report says against the storages that are really there."""
    model, wrong = stack(**options), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        squares(model, step).backward()
        optimizer.step()
        report = memory_report(model, optimizer)
        parameters = {p._local_tensor.untyped_storage()._cdata: p._local_tensor for p in model.parameters()}
        grads = {p.grad._local_tensor.untyped_storage()._cdata: p.grad._local_tensor for p in model.parameters()}
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        states = {t.untyped_storage()._cdata: t for t in (getattr(v, "_local_tensor", v) for v in states)}
        observed = [sum(t.untyped_storage().nbytes() for t in group.values()) for group in (parameters, grads, states)]
        reported = [report.parameters, report.gradients, report.optimizer_state]
        if observed != reported:
            wrong.append(f"step {step}: observed {observed}, reported {reported}")
        for bucket in report.buckets:
            if (bucket.parameters, bucket.gradients) != (bucket.predicted_parameters, bucket.predicted_gradients):
                wrong.append(f"step {step}: {bucket}")
        if sum(b.numel for b in report.buckets) != sum(p.numel() for p in model.parameters()):
            wrong.append("numel")
        pool = pool_of(model)
        lent = {block.storage._cdata for blocks in pool._lent.values() for block in blocks}
        grads_in_pool = sum(t.untyped_storage().nbytes() for cdata, t in grads.items() if cdata in lent)
        if not grads_in_pool or report.buffers_held + grads_in_pool != pool.ledger.held:
            wrong.append("buffers_held")
        del grads
        for word in ("total: parameters", "communication buffers", *[b.name for b in report.buckets]):
            if word not in str(report):
                wrong.append(f"str() lacks {word!r}")
        optimizer.zero_grad()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_memory_report_predicts_what_is_observed(world_size: int) -> None:
    assert cluster.run(world_size, shards_and_report, world_size) == [[]] * world_size


def kept_gradients() -> tuple[list[int], list[bool]]:
    """Bytes the pool holds after each step, and whether gradients that the user kept were left alone."""
    model = stack()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    held, right = [], []
    for step in range(6):
        squares(model, step).backward()
        if step == 1:
            # Those that stay where they were summed: by their DTensors, and by nothing but a storage.
            kept = [(p.grad, p.grad.to_local().clone()) for p in (model.head, model.blocks[0].up.weight)]
            local = model.head.grad._local_tensor
            storage, again = local.untyped_storage(), (local.storage_offset(), local.shape, local.stride())
            values = local.clone()
            del local
        model.zero_grad()
        right += [torch.equal(g.to_local(), value) for g, value in kept]
        if step == 2:
            kept.clear()
        if 1 <= step <= 3:
            right.append(torch.equal(torch.empty(0).set_(storage, *again), values))
        if step == 3:
            del storage
        held.append(pool_of(model).ledger.held)
    return held, right


def test_gradients_that_the_user_keeps_are_left_alone() -> None:
    """Their memory came from the pool; it goes back when the last reference to it goes."""
    for held, right in cluster.run(2, kept_gradients):
        assert all(right) and len(right) == 7
        # Grows once, for what is kept, and not again after it has come back.
        assert held[0] == held[1] < held[2] == held[3] == held[4] == held[5]


def report_of_a_plain_module() -> str:
    try:
        memory_report(nn.Linear(2, 2))
    except ValueError as error:
        return str(error)
    return "no error"


def test_memory_report_of_a_plain_module_is_an_error() -> None:
    assert "fully_shard" in cluster.run(1, report_of_a_plain_module)[0]


def rests(case: str) -> list[tuple[int, dict[str, int]]]:
    """Memory in use after evaluation, an abandoned forward, unused parameters, and a step."""
    torch.manual_seed(0)
    model = Optional()
    for child in (model.a, model.b, model.c):
        fully_shard(child)
    fully_shard(model)
    seen = []
    if case == "no_grad":
        with torch.no_grad():
            model(data())
    elif case == "inference":
        with torch.inference_mode():
            model(data())
    elif case == "unused":
        model.skip = ("b", "scale")
        squares(model).backward()
    elif case == "abandoned":
        model(data())
        squares(model).backward()
    seen.append(rest(model))
    model.skip = ()
    squares(model, 1).backward()
    seen.append(rest(model))
    return seen


@pytest.mark.parametrize("case", ["no_grad", "inference", "unused", "abandoned"])
def test_nothing_is_in_use_between_iterations(case: str) -> None:
    for seen in cluster.run(2, rests, case):
        assert seen == [(0, {}), (0, {})]


def freed_with_the_model() -> list[bool]:
    model = stack()
    squares(model).backward()
    alive = [
        weakref.ref(model),
        weakref.ref(state_of(model).bucket),
        weakref.ref(pool_of(model)),
        weakref.ref(next(model.parameters())._local_tensor),
    ]
    del model
    gc.collect()
    return [reference() is None for reference in alive]


def test_a_deleted_model_frees_its_memory() -> None:
    """Hooks, caches and queued callbacks must not keep it."""
    assert cluster.run(2, freed_with_the_model) == [[True] * 4] * 2


def graphs_after_steps(kind: str) -> tuple[int, int]:
    """Live tensors of this model after 4 and after 12 iterations."""
    # Not those of earlier tests on this rank: caches of torch, which hold some, drop them at any time.
    earlier = {id(o): weakref.ref(o) for o in gc.get_objects() if isinstance(o, torch.Tensor)}

    def alive() -> int:
        # A thread of gloo's drops the tensors of a collective some time after it has said that this is done, and needs
        # Python's lock for it.
        time.sleep(0.05)  # which lets it have that; gloo offers nothing to wait for
        gc.collect()
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        return sum(id(o) not in earlier or earlier[id(o)]() is not o for o in tensors)

    model = stack()
    for step in range(12):
        loss = squares(model, step)
        if kind == "train":
            loss.backward()
            model.zero_grad()
        del loss
        if step == 3:
            early = min(alive() for _ in range(3))
    late, end = alive(), time.monotonic() + 10
    while late > early and time.monotonic() < end:
        late = alive()
    return early, late


@pytest.mark.parametrize("kind", ["train", "forward only"])
def test_iterations_leave_no_tensors_behind(kind: str) -> None:
    for early, late in cluster.run(2, graphs_after_steps, kind):
        assert late <= early


def records_of_abandoned_forwards() -> int:
    """Forwards whose backward never comes (evaluation without no_grad) must not grow any record."""
    model = stack()
    for step in range(6):
        squares(model, step)
    schedule = state_of(model).schedule
    return max(len(v) for v in vars(schedule).values() if isinstance(v, (list, set)))


def test_abandoned_forwards_leave_no_growing_record() -> None:
    assert max(cluster.run(2, records_of_abandoned_forwards)) <= 8
