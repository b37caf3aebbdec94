"""The hooks: each one is needed, a torch that differs is refused with a list, and installing again changes nothing."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import textwrap
from copy import deepcopy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from ragged_shard import RaggedShard, fused
from ragged_shard.install import HOOKS, install, installed
from tests import cluster

FULL = torch.arange(24.0).reshape(6, 4)
ROWS = RaggedShard((0,), (1, 2))
ELEMENTS = RaggedShard((0, 1), (5, 7))


def held(placement) -> torch.Tensor:
    k, rank = len(placement.dims), dist.get_rank()
    rows = FULL.reshape(-1, *FULL.shape[k:])
    unit = len(rows) // sum(placement.local_units)
    start = unit * sum(placement.local_units[:rank])
    return rows[start : start + unit * placement.local_units[rank]].clone()


def ragged(placement=ROWS) -> DTensor:
    return DTensor.from_local(held(placement), cluster.mesh((2,)), [placement], shape=FULL.shape, stride=FULL.stride())


# ---- one scenario per hook: it works, and without the hook it does not ----


def moves():
    moved = ragged().requires_grad_().redistribute(placements=[ELEMENTS])
    assert torch.equal(moved.to_local(), held(ELEMENTS))


def moves_without_autograd():
    """``Redistribute.apply`` and a spec of its own for every call cost more than a small gather."""
    from torch.distributed.tensor._redistribute import Redistribute

    x, entered = ragged(), []
    with mock.patch.object(Redistribute, "apply", side_effect=lambda *args: entered.append(args)):
        moved = x.redistribute(placements=[ELEMENTS])
    assert not entered
    assert torch.equal(moved.to_local(), held(ELEMENTS)) and not moved.requires_grad
    with torch.no_grad():
        assert not x.requires_grad_().redistribute(placements=[ELEMENTS]).requires_grad
    assert x.redistribute(placements=[ELEMENTS]).requires_grad
    assert x.redistribute(placements=[ELEMENTS], forward_dtype=torch.float64).dtype == torch.float64


def cuts_an_operand():
    whole = DTensor.from_local(FULL.clone(), cluster.mesh((2,)), [Replicate()])
    assert torch.equal((ragged() + whole).to_local(), held(ROWS) * 2)


def brings_back_a_gradient():
    local = held(ROWS).requires_grad_()
    x = DTensor.from_local(local, cluster.mesh((2,)), [ROWS], shape=FULL.shape, stride=FULL.stride())
    x.sum().backward()
    assert torch.equal(local.grad, torch.ones_like(local))


def gradient_of_a_partial():
    x = DTensor.from_local(FULL.clone(), cluster.mesh((2,)), [Partial()]).requires_grad_()
    x.redistribute(placements=[ROWS]).backward(ragged())
    assert x.grad.placements == (Replicate(),) and torch.equal(x.grad.to_local(), FULL)


def second_derivative():
    x = ragged().requires_grad_()
    y = x.redistribute(placements=[ELEMENTS])
    (first,) = torch.autograd.grad(y * y * y, x, torch.ones_like(y), create_graph=True)
    (second,) = torch.autograd.grad(first, x, torch.ones_like(x))
    assert torch.equal(second.to_local(), 6 * held(ROWS))


def adds():
    assert torch.equal((ragged() + ragged()).to_local(), held(ROWS) * 2)


def refuses_argmax():
    with pytest.raises(RuntimeError, match=r"Ragged.*redistribute\(\)"):
        ragged().argmax()


def distributes():
    assert torch.equal(distribute_tensor(FULL.clone(), cluster.mesh((2,)), [ROWS]).to_local(), held(ROWS))


def draws():
    torch.manual_seed(3)
    made = torch.distributed.tensor.rand(6, 4, device_mesh=cluster.mesh((2,)), placements=[ROWS])
    torch.manual_seed(3)
    assert torch.equal(made.full_tensor(), torch.rand(6, 4))


def checks_a_local():
    made = DTensor.from_local(held(ROWS).view(-1), cluster.mesh((2,)), [ROWS], shape=FULL.shape, stride=FULL.stride())
    assert made.to_local().shape == held(ROWS).shape


def gradient_of_a_local():
    x = ragged().requires_grad_()
    x.to_local().sum().backward()
    assert x.grad.placements == (ROWS,)


def offsets():
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(FULL.shape, cluster.mesh((2,)), [ROWS])
    assert (shape, offset) == (((2, 4), (0, 0)), ((4, 4), (2, 0)))[dist.get_rank()]


def checkpoint():
    names: list = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    dcp.save({"x": ragged(ELEMENTS)}, checkpoint_id=names[0])
    target = {"x": ragged(ELEMENTS)}
    target["x"].to_local().zero_()
    dcp.load(target, checkpoint_id=names[0])
    assert torch.equal(target["x"].to_local(), held(ELEMENTS))


def safetensors():
    names: list = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    writer = HuggingFaceStorageWriter(names[0], save_distributed=True)
    dcp.save({"x": ragged(ELEMENTS)}, storage_writer=writer)
    target = {"x": torch.zeros(6, 4)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(names[0]))
    assert torch.equal(target["x"], FULL)


def sets_a_full_state():
    module = nn.Linear(4, 6, bias=False)
    module.weight = nn.Parameter(ragged(ELEMENTS))
    module.weight.data.to_local().zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, {"weight": FULL.clone()} if dist.get_rank() == 0 else {}, options=options)
    assert torch.equal(module.weight.to_local(), held(ELEMENTS))


def has_a_key_of_its_own():
    """Ranks whose layouts are equal, and whose local shapes are not, must not find each other's compiled code."""
    keys = [None, None]
    dist.all_gather_object(keys, ragged()._stable_hash_for_caching())
    assert keys[0] != keys[1] and keys[dist.get_rank()] == ragged()._stable_hash_for_caching()
    assert ragged(ELEMENTS)._stable_hash_for_caching() not in keys


def compiles_again_for_another_shape():
    """On rank 0, whose shard is empty both times."""
    placement = RaggedShard((0,), (0, 1))
    torch._dynamo.reset()
    run = torch.compile(lambda x: (x * 2).redistribute(placements=[Replicate()]).to_local(), backend="eager")
    for rows in (2, 3):
        full = torch.arange(rows * 2.0).reshape(rows, 2)
        local = full[:0] if dist.get_rank() == 0 else full
        x = DTensor.from_local(local, cluster.mesh((2,)), [placement], shape=full.shape, stride=full.stride())
        guarded = x._spec._check_equals(ragged(placement)._spec, skip_shapes=True)
        assert not guarded
        assert torch.equal(run(x), full * 2)


def copies_a_view():
    """A shard that lies inside a flat buffer, as those of fully_shard do: deepcopy, torch.save, async_save."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    flat = torch.zeros(3 + held(ROWS).numel())
    local = flat[3:].view(held(ROWS).shape).copy_(held(ROWS))
    x = nn.Parameter(DTensor.from_local(local, cluster.mesh((2,)), [ROWS], shape=FULL.shape, stride=FULL.stride()))
    x.grad = x.detach() * 2
    file = io.BytesIO()
    torch.save({"x": x.detach(), "parameter": x}, file)
    copy = deepcopy(x)
    staged = StateDictStager(pin_memory=False, share_memory=False).stage({"x": x.detach()})["x"]
    local.zero_()
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for found in (copy, copy.grad / 2, staged, loaded["x"], loaded["parameter"]):
        assert isinstance(found, DTensor) and found.placements == (ROWS,)
        assert torch.equal(found.to_local(), held(ROWS))
    assert isinstance(copy, nn.Parameter) and isinstance(loaded["parameter"], nn.Parameter) and copy.requires_grad


def updates_without_dispatch():
    """A spec for every tensor of every row, made and compared in Python, costs more than a small model's update."""
    parameters = [nn.Parameter(ragged()) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    calls = []

    def note(frame, event, _):
        if event == "call" and "torch/distributed/tensor/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    for measured in (False, False, True):
        for parameter in parameters:
            parameter.grad = ragged()
        sys.setprofile(note if measured else None)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    assert not calls, calls


SCENARIOS = {
    "_api:_dtensor_init_helper": draws,
    "DTensor.redistribute": moves_without_autograd,
    "_redistribute:redistribute_local_tensor": moves,
    "_dispatch:redistribute_local_tensor": cuts_an_operand,
    "_api:redistribute_local_tensor": brings_back_a_gradient,
    "_redistribute:_redistribute_backward": gradient_of_a_partial,
    "NestedRedistribute.forward": second_derivative,
    "sharding_propagator.propagate_op_sharding_non_cached": adds,
    "sharding_propagator.propagate_op_sharding": refuses_argmax,
    "_api:distribute_tensor": distributes,
    "DTensor.from_local": checks_a_local,
    "_ToTorchTensor.backward": gradient_of_a_local,
    "_compute_local_shape_and_global_offset": offsets,
    "__create_write_items__": checkpoint,
    "__create_chunk_list__": checkpoint,
    "__get_tensor_shard__": checkpoint,
    "_split_by_storage_plan": safetensors,
    "_distribute_tensors": sets_a_full_state,
    "DTensor.data_ptr": copies_a_view,
    "DTensor._stable_hash_for_caching": has_a_key_of_its_own,
    "DTensorSpec._check_equals": compiles_again_for_another_shape,
    "_op_dispatcher._custom_op_handlers": updates_without_dispatch,
}


def hook_of(ending: str):
    (hook,) = (hook for hook in HOOKS if hook.path.endswith(ending))
    return hook


@contextlib.contextmanager
def removed(hook):
    """Torch without one hook."""
    current = hook.current()
    if hook.code:
        code, defaults, keywords = current.__code__, current.__defaults__, current.__kwdefaults__
        stock = current.__wrapped__
        current.__code__, current.__defaults__, current.__kwdefaults__ = (
            stock.__code__,
            stock.__defaults__,
            stock.__kwdefaults__,
        )
    elif hook.name == "_custom_op_handlers":
        setattr(hook.owner, hook.name, {op: handler for op, handler in current.items() if handler is not fused.run})
    elif hook.name == "propagate_op_sharding":
        stock = type(current)(hook_of("propagate_op_sharding_non_cached").current().__wrapped__)
        setattr(hook.owner, hook.name, stock)
    else:
        setattr(hook.owner, hook.name, staticmethod(current.__wrapped__) if hook.static else current.__wrapped__)
    torch._C._clear_DTensor_sharding_propagator_cache()
    try:
        yield
    finally:
        if hook.code:
            current.__code__, current.__defaults__, current.__kwdefaults__ = code, defaults, keywords
        else:
            setattr(hook.owner, hook.name, staticmethod(current) if hook.static else current)
        torch._C._clear_DTensor_sharding_propagator_cache()


def with_and_without(ending):
    scenario, hook = SCENARIOS[ending], hook_of(ending)
    scenario()
    try:
        with removed(hook):
            scenario()
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
    else:
        failure = ""
    assert installed()
    scenario()
    return failure


def test_every_hook_has_a_scenario():
    assert len(SCENARIOS) == len(HOOKS)
    assert {hook_of(ending) for ending in SCENARIOS} == set(HOOKS)


@pytest.mark.parametrize("ending", SCENARIOS)
def test_each_hook_is_needed(ending):
    """On all ranks alike: the scenarios fail before they communicate, or compare values after."""
    failures = cluster.run(2, with_and_without, ending)
    assert any(failures), f"nothing fails without the hook on {ending}"


# ---- installing ----


def in_a_process(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=cluster.REPOSITORY,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_installing_again_changes_nothing():
    before = [hook.current() for hook in HOOKS]
    install()
    assert all(a is b for a, b in zip(before, (hook.current() for hook in HOOKS), strict=True))
    assert installed()


def test_order_of_imports_and_threads():
    in_a_process(
        """
        import threading
        import torch, torch.distributed as dist
        from torch.distributed.tensor import distribute_tensor, DTensor, Shard, init_device_mesh
        from torch.distributed.tensor._redistribute import Redistribute
        import torch.distributed.fsdp, torch.distributed.checkpoint

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        (x + x).sum()                                   # the C++ caches are warm

        from ragged_shard.install import install, installed
        errors = []
        def work():
            try:
                from ragged_shard.placement import RaggedShard
                install()
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert not errors and installed(), errors

        from ragged_shard import RaggedShard
        # A function that was imported by value before the hooks.
        y = distribute_tensor(torch.arange(6.0), mesh, [RaggedShard((0,), (1,))])
        assert torch.equal((y + y).full_tensor(), torch.arange(6.0) * 2)
        assert torch.equal(y.redistribute(placements=[Shard(0)]).to_local(), torch.arange(6.0))
        z = distribute_tensor(torch.arange(6.0), device_mesh=mesh, placements=[Shard(0)], src_data_rank=None)
        assert z.placements == (Shard(0),)
        """
    )


def test_a_torch_that_differs_is_refused_with_the_whole_list():
    printed = in_a_process(
        """
        import torch, torch.distributed.tensor
        from torch.distributed.tensor import _api, _dispatch, _redistribute, _utils, _dtensor_spec
        from ragged_shard.install import HOOKS, probe
        import ragged_shard.install as module

        assert probe() == []

        def misfit(owner, name, value, says):
            saved = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
            try:
                found = probe()
                assert any(says in line for line in found), (says, found)
            finally:
                setattr(owner, name, saved)
            assert probe() == []

        misfit(_redistribute, "_redistribute_backward", None, "_redistribute_backward does not exist")
        misfit(_utils, "_compute_local_shape_and_global_offset",
               lambda shape, mesh_shape, my_coordinate, placements, skip_offset=False: 0, "expected ('global_shape'")
        misfit(_api.DTensor, "__create_chunk_list__", lambda self, storage: [], "requires new arguments ['storage']")
        misfit(_api.DTensor, "from_local", staticmethod(lambda local_tensor, mesh=None, placements=None: 0),
               "takes ('local_tensor', 'mesh'")
        misfit(_api._ToTorchTensor, "backward", 3, "is no function but 3")
        misfit(_dispatch, "redistribute_local_tensor",
               lambda local_tensor, current_spec, target_spec, **kw: 0, "another library has patched it")
        misfit(_utils, "compute_local_shape_and_global_offset", lambda *a: 0, "does not call")
        misfit(torch._C, "_clear_DTensor_sharding_propagator_cache", None, "_clear_DTensor_sharding_propagator_cache")

        # Two at once, and the import.
        del _redistribute._redistribute_backward
        saved, _api.DTensor.__get_tensor_shard__ = _api.DTensor.__get_tensor_shard__, lambda self: 0
        before = [hook.current() for hook in HOOKS[:3]]
        try:
            import ragged_shard.placement
        except ImportError as error:
            print(error)
        else:
            raise AssertionError("installed over a misfit")
        assert [hook.current() for hook in HOOKS[:3]] == before, "nothing may be patched"
        """
    )
    assert torch.__version__ in printed and "Nothing was changed" in printed
    assert "_redistribute_backward does not exist" in printed and "__get_tensor_shard__ takes ('self',)" in printed


def test_versions_out_of_range():
    in_a_process(
        """
        import warnings
        import torch, torch.distributed.tensor
        torch.__version__ = "2.10.1"
        try:
            import ragged_shard.placement
        except ImportError as error:
            assert "older than 2.12" in str(error), error
        else:
            raise AssertionError
        torch.__version__ = "2.99.0"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import ragged_shard.placement
        assert any("has not been tested with torch 2.99.0" in str(w.message) for w in caught)
        """
    )


def test_the_doctor_reports_every_hook():
    printed = in_a_process(
        "import runpy, sys; sys.argv = ['doctor']\ntry: runpy.run_module('ragged_shard.doctor', "
        "run_name='__main__')\nexcept SystemExit as e: assert e.code == 0"
    )
    for hook in HOOKS:
        assert hook.path in printed and hook.why in printed
    assert "fits" in printed and "MISFIT" not in printed
