"""How would this model lie on a cluster? ``python -m ragged_shard.plan MODEL --ranks 8,64,512 --block rows=32``

MODEL is an inventory (JSON), a model factory (``package.module:function``, built on the meta device) or a folder
with a distributed checkpoint. For each group size: padding and its lower bound, bytes per rank, bytes on the wire,
what makes a cell bad and what would mend it. No GPU, and for an inventory no torch.

An inventory holds the buckets ("units") of a model; ``repeat`` stands for that many groups with ``{e}`` = 0, 1, ...
in names::

    {"model": "tiny", "units": [
        {"unit": "layers.0..31", "count": 32, "params": [
            ["attention.weight", [4096, 4096]],
            {"repeat": 8, "params": [["experts.{e}.weight", [4096, 1024]]]}]}]}
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ragged_shard.block import Block
from ragged_shard.planner import BucketPlan, TensorSpec, plan_bucket
from ragged_shard.policy import apply_policy

__all__ = ["Unit", "main", "read_inventory", "tensor_specs"]

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8": 1}

# Bytes of optimizer state per element: (matrices, everything else). Rules for matrices leave the rest to AdamW.
STATE_BYTES = {
    "AdamW": (8.0, 8.0),  # two fp32 moments
    "AdamW8bit": (2.0 + 8 / 1024, 8.0),  # two codes, and two fp32 scales for a tile of 32 x 32
    "Muon": (4.0, 8.0),  # fp32 momentum
    "Shampoo": (24.0, 8.0),  # square matrices: L, R and their roots 16, grafting 4, momentum 4
}
COLLECTIVES_PER_STEP = 3  # all-gather in forward and in backward, reduce-scatter of the gradients
BAD = 0.03  # padding that needs an explanation
LAYERS = r"^(?:.*?\.)?[A-Za-z_]+\.\d+(?=\.)"  # up to the first number in a name: model.layers.7

Shape = tuple[int, ...]
BlockOf = Callable[[str, Shape], int]


class BadInput(Exception):
    """What is wrong, and where, in one line."""


@dataclass(frozen=True)
class Unit:
    """``count`` equal buckets of parameters, (name, shape) each."""

    name: str
    count: int
    params: tuple[tuple[str, Shape], ...]

    @property
    def numel(self) -> int:
        """Elements of one bucket."""
        return sum(math.prod(shape) for _, shape in self.params)


# ---- where parameters come from
# ----------------------------------------------------------------------------------------


def read_inventory(path: str) -> list[Unit]:
    """The units of an inventory file. Raises ``BadInput`` naming the file, the unit and the parameter."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    expect(path, data, dict, "an object with a list of units")
    known(path, data, ("model", "variant", "total_params", "dtype", "config_source", "units"))
    units: list[Unit] = []
    for number, entry in enumerate(expect(path, data.get("units"), list, 'a list under "units"')):
        where = f"{path}: unit {number}"
        expect(where, entry, dict, "an object")
        known(where, entry, ("unit", "count", "params", "numel"))
        name = expect(where, entry.get("unit", f"unit {number}"), str, 'a name under "unit"')
        where = f"{path}: unit {name!r}"
        if any(unit.name == name for unit in units):
            raise BadInput(f"{where} is there twice")
        unit = Unit(
            name, positive(where, "count", entry.get("count", 1)), tuple(read_params(where, entry.get("params")))
        )
        check_names(where, unit)
        if "numel" in entry and entry["numel"] != unit.numel:
            raise BadInput(f"{where}: numel is given as {entry['numel']}, the shapes make {unit.numel}")
        units.append(unit)
    if not units:
        raise BadInput(f"{path}: there are no units")
    return units


def read_params(where: str, entries: Any) -> Iterator[tuple[str, Shape]]:
    for entry in expect(where, entries, list, 'a list under "params"'):
        if isinstance(entry, dict):
            known(where, entry, ("repeat", "params"))
            group = list(read_params(where, entry.get("params")))
            for number in range(positive(where, "repeat", entry.get("repeat"))):
                yield from ((name.replace("{e}", str(number)), shape) for name, shape in group)
            continue
        if not (
            isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], list)
        ):
            raise BadInput(f"{where}: a parameter is [name, shape] or an object with repeat and params, not {entry!r}")
        name, shape = entry
        yield name, tuple(positive(f"{where}: {name!r}", "a size", size) for size in shape)


def check_names(where: str, unit: Unit) -> None:
    names = [name for name, _ in unit.params]
    if not names:
        raise BadInput(f"{where} has no parameters")
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise BadInput(f"{where}: two parameters are named {twice!r}")


def expect(where: str, value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise BadInput(f"{where}: expected {what}, found {value!r}"[:300])
    return value


def known(where: str, entry: dict[str, Any], keys: Sequence[str]) -> None:
    unknown = sorted(entry.keys() - set(keys))
    if unknown:
        raise BadInput(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(keys)}")


def positive(where: str, what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(f"{where}: {what} must be an integer of at least 1, not {value!r}")
    return value


def imported(path: str) -> Any:
    """What ``package.module:name`` names; modules of the current folder are found too."""
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module may raise anything
        raise BadInput(f"{path}: cannot be imported: {one_line(error)}") from None
    return found


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def from_factory(path: str, regex: str | None) -> list[Unit]:
    """The parameters of the module that the factory returns, built on the meta device."""
    factory = imported(path)
    import torch

    try:
        with torch.device("meta"):
            module = factory()
        params = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    except Exception as error:  # the factory may raise anything
        raise BadInput(f"{path}: the model factory failed: {one_line(error)}") from None
    return grouped(path, params, regex or LAYERS)


def from_checkpoint(path: str, regex: str | None) -> list[Unit]:
    """The tensors of a distributed checkpoint, without optimizer states."""
    try:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # unpickling may raise anything
        raise BadInput(f"{path}: not a distributed checkpoint: {one_line(error)}") from None
    params = [
        (name.removeprefix("model."), tuple(entry.size))
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
        and entry.properties.dtype.is_floating_point
        and not re.match(r"(optim|optimizer)s?\b", name)
    ]
    return grouped(path, params, regex or LAYERS)


def grouped(path: str, params: Iterable[tuple[str, Shape]], regex: str) -> list[Unit]:
    """Buckets of the parameters whose names match alike; the others make the bucket "root". Equal neighbours are
    one unit."""
    buckets: dict[str, list[tuple[str, Shape]]] = {}
    for name, shape in params:
        match = re.search(regex, name)
        bucket = "root" if match is None else match.group(1 if match.re.groups else 0)
        buckets.setdefault(bucket, []).append((name.removeprefix(f"{bucket}."), shape))
    if not buckets:
        raise BadInput(f"{path}: there are no parameters")
    units: list[Unit] = []
    first = ""
    for bucket, content in buckets.items():
        unit = Unit(bucket, 1, tuple(content))
        if units and units[-1].params == unit.params:
            units[-1] = replace(units[-1], name=f"{first}..{bucket.rpartition('.')[2]}", count=units[-1].count + 1)
        else:
            units.append(unit)
            first = bucket
    return units


def regrouped(units: Sequence[Unit], regex: str) -> list[Unit]:
    """Take the parameters of each unit that match into units of their own."""
    answer: list[Unit] = []
    for unit in units:
        parts: dict[str, list[tuple[str, Shape]]] = {}
        for name, shape in unit.params:
            match = re.search(regex, name)
            part = "" if match is None else match.group(1 if match.re.groups else 0)
            parts.setdefault(part, []).append((name, shape))
        for part, content in parts.items():
            answer.append(Unit(f"{unit.name} {part}".strip(), unit.count, tuple(content)))
    return answer


# ---- blocks
# ------------------------------------------------------------------------------------------------------------


def parse_block(text: str) -> Block:
    """``rows=32``, ``elements=1024``, ``slices=1``, ``tile=32x32`` or ``whole``."""
    kind, _, value = text.partition("=")
    try:
        sizes = [int(size) for size in re.split("[x,]", value)] if value else []
        return Block(kind, tuple(sizes))  # type: ignore[arg-type]
    except ValueError as error:
        raise BadInput(
            f"--block {text}: {error}; use rows=32, elements=1024, slices=1, tile=32x32, whole, or a policy"
        ) from None


class Parameter:
    """What a policy may ask of a parameter, without torch."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.ndim = len(shape)
        self.requires_grad = True

    def numel(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Shape | int:
        return self.shape if dim is None else self.shape[dim]


def block_of(text: str) -> BlockOf:
    """(name, shape) -> elements of a block. Vectors have none, unless a policy says so."""
    if ":" in text:
        policy = imported(text)

        def by_policy(name: str, shape: Shape) -> int:
            try:
                block = apply_policy(policy, name, Parameter(shape)).block
            except Exception as error:  # the policy may raise anything
                raise BadInput(f"--block {text}: {one_line(error)}") from None  # it names the parameter
            return 1 if block is None else block.numel(shape)

        return by_policy
    block = parse_block(text)

    def by_shape(name: str, shape: Shape) -> int:
        try:
            return block.numel(shape) if len(shape) > 1 else 1
        except ValueError as error:
            raise BadInput(f"--block {text}: parameter {name!r}: {error}") from None

    return by_shape


def tensor_specs(unit: Unit, block: str | BlockOf = "rows=1", itemsize: int = 2) -> tuple[TensorSpec, ...]:
    """The tensors of one bucket, for the planner."""
    size = block_of(block) if isinstance(block, str) else block
    return tuple(TensorSpec(name, math.prod(shape), itemsize, size(name, shape)) for name, shape in unit.params)


# ---- one group size
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    itemsize: int
    alignment_bytes: int
    max_buffers: int
    min_saving: float
    method: Any
    replicas: int


@dataclass(frozen=True)
class GroupSize:
    """The whole model over groups of ``ranks``. Bytes are per rank."""

    ranks: int
    units: tuple[Unit, ...]
    plans: tuple[BucketPlan, ...]
    options: Options

    @property
    def numel(self) -> int:
        return sum(unit.count * unit.numel for unit in self.units)

    @property
    def padding(self) -> float:
        return sum(unit.count * plan.padding for unit, plan in zip(self.units, self.plans, strict=True)) / self.numel

    @property
    def bound(self) -> float:
        """The padding that the lower bounds leave."""
        least = sum(unit.count * plan.lower_bound for unit, plan in zip(self.units, self.plans, strict=True))
        return max(0.0, least * self.ranks / self.numel - 1)

    @property
    def optimal(self) -> bool:
        return all(plan.optimal for plan in self.plans)

    @property
    def shard(self) -> int:
        """Elements per rank."""
        return sum(unit.count * plan.shard for unit, plan in zip(self.units, self.plans, strict=True))

    @property
    def sharded_bytes(self) -> int:
        """Parameters, and as much again for gradients."""
        return self.shard * self.options.itemsize

    def state_bytes(self, optimizer: str) -> float:
        """Optimizer state, padding included: states lie in buffers of the same layout."""
        matrix, other = STATE_BYTES[optimizer]
        total = 0.0
        for unit, plan in zip(self.units, self.plans, strict=True):
            matrices = sum(math.prod(shape) for _, shape in unit.params if len(shape) > 1)
            unpadded = matrices * matrix + (unit.numel - matrices) * other
            total += unit.count * plan.shard * unpadded / unit.numel
        return total

    @property
    def transient_bytes(self) -> int:
        """The largest gathered bucket."""
        return max(plan.shard for plan in self.plans) * self.ranks * self.options.itemsize

    @property
    def collective_bytes(self) -> int:
        """Sent by a rank in the largest collective."""
        return max(plan.shard for plan in self.plans) * (self.ranks - 1) * self.options.itemsize

    @property
    def step_bytes(self) -> float:
        """Sent by a rank in a step: all-gather twice, reduce-scatter, and the all-reduce of gradients between
        replicas."""
        replicas = self.options.replicas
        between = 2 * (replicas - 1) / replicas * self.sharded_bytes
        return COLLECTIVES_PER_STEP * (self.ranks - 1) * self.sharded_bytes + between

    @property
    def memory(self) -> float:
        return 2 * self.sharded_bytes + self.state_bytes("AdamW")

    def worst(self) -> int:
        """Index of the unit with the most padding."""
        wasted = [unit.count * plan.padding for unit, plan in zip(self.units, self.plans, strict=True)]
        return max(range(len(wasted)), key=lambda i: wasted[i])


def plan_unit(unit: Unit, ranks: int, block: BlockOf, options: Options) -> BucketPlan:
    return plan_bucket(
        tensor_specs(unit, block, options.itemsize),
        ranks,
        alignment_bytes=options.alignment_bytes,
        max_buffers=options.max_buffers,
        min_saving=options.min_saving,
        method=options.method,
    )


def best_of(sizes: Sequence[GroupSize]) -> GroupSize:
    """Of the group sizes whose padding is not bad the one with the least memory per rank, else the least padding."""
    good = [size for size in sizes if size.padding <= BAD]
    return min(good, key=lambda s: (s.memory, s.ranks)) if good else min(sizes, key=lambda s: (s.padding, s.ranks))


def mends(size: GroupSize, text: str, block: BlockOf) -> list[str]:
    """What would bring the padding of the worst unit down: each tried out, best first."""
    unit, options, ranks = size.units[size.worst()], size.options, size.ranks
    now = size.plans[size.worst()].padding_fraction
    tried: list[tuple[float, str]] = []

    kind, _, value = text.partition("=")
    if kind in ("rows", "elements", "slices") and value:
        smaller = int(value) // 2
        while smaller:
            plan = plan_unit(unit, ranks, block_of(f"{kind}={smaller}"), options)
            if plan.padding_fraction <= BAD or smaller == 1:
                tried.append((plan.padding_fraction, f"smaller blocks, --block {kind}={smaller}"))
                break
            smaller //= 2
    for layers in (2, 4):
        if unit.count >= layers:
            merged = Unit("", 1, tuple((f"{i}.{name}", shape) for i in range(layers) for name, shape in unit.params))
            plan = plan_unit(merged, ranks, block, options)
            tried.append((plan.padding_fraction, f"{layers} layers in a bucket"))
            if plan.padding_fraction <= BAD:
                break
    fewer, replicas = ranks // 2, 2
    while fewer >= 2 and fewer * replicas == ranks:
        plan = plan_unit(unit, fewer, block, options)
        if plan.padding_fraction <= BAD:
            tried.append(
                (plan.padding_fraction, f"groups of {fewer} and {replicas * options.replicas} replicas (HSDP)")
            )
            break
        fewer, replicas = fewer // 2, replicas * 2
    better = sorted((padding, what) for padding, what in tried if padding < now / 2)
    return [f"{what}: {padding:.2%}" for padding, what in better]


# ---- output
# ------------------------------------------------------------------------------------------------------------


def human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    raise AssertionError


def percent(fraction: float) -> str:
    return f"{fraction:.2%}" if fraction < 0.1 else f"{fraction:.1%}" if fraction < 1 else f"{fraction:,.0%}"


def table(sizes: Sequence[GroupSize]) -> list[str]:
    best = best_of(sizes)
    header = ["ranks", "padding", "bound", "params", "grads", *STATE_BYTES, "gathered", "collective", "step"]
    rows = [header]
    for size in sizes:
        mark = "*" if size is best else "!" if size.padding > BAD else ""
        bound = "proved" if size.optimal else percent(size.bound)
        cells = [size.sharded_bytes, size.sharded_bytes, *(size.state_bytes(name) for name in STATE_BYTES)]
        cells += [size.transient_bytes, size.collective_bytes, size.step_bytes]
        rows.append([f"{mark}{size.ranks}", percent(size.padding), bound, *map(human, cells)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def legend(sizes: Sequence[GroupSize], options: Options) -> list[str]:
    lines = [
        "padding     elements of the buffers that belong to no parameter, over the elements of the parameters",
        'bound       what no even buffers of the same tensors can beat; "proved" where the plan meets it',
        "params ...  bytes per rank: parameters, gradients, and the state of each optimizer; padding included",
        "gathered    the largest transient buffer: one bucket, all-gathered",
        "collective  bytes that a rank sends in the largest collective; step: in a training step, all collectives",
    ]
    if options.replicas > 1:
        lines.append(f"            (with the all-reduce of gradients between {options.replicas} replicas)")
    if len(sizes) > 1:
        best = best_of(sizes)
        reason = "least memory per rank with at most 3% padding" if best.padding <= BAD else "least padding"
        lines.append(f"*           best group size: {best.ranks} ({reason})")
    if any(size.padding > BAD for size in sizes):
        lines.append("!           more than 3% padding:")
    return lines


def explanations(sizes: Sequence[GroupSize], text: str, block: BlockOf, tick: Callable[[], None]) -> list[str]:
    lines = []
    for size in sizes:
        if size.padding > BAD:
            unit, plan = size.units[size.worst()], size.plans[size.worst()]
            lines.append(f"  {size.ranks} ranks: {unit.name} is padded by {percent(plan.padding_fraction)}")
            lines += [f"      because {reason}" for reason in plan.forced_by]
            found = mends(size, text, block)
            lines += [f"      mend: {mend}" for mend in found] or [
                "      no smaller block, merge or group size tried mends it"
            ]
        tick()
    return lines


def as_json(sizes: Sequence[GroupSize]) -> str:
    return json.dumps(
        [
            {
                "ranks": size.ranks,
                "unit": unit.name,
                "count": unit.count,
                "numel": plan.numel,
                "shards": [buffer.shard for buffer in plan.buffers],
                "padding": plan.padding_fraction,
                "lower_bound": plan.lower_bound,
                "optimal": plan.optimal,
                "forced_by": list(plan.forced_by),
                "digest": plan.digest(),
            }
            for size in sizes
            for unit, plan in zip(size.units, size.plans, strict=True)
        ],
        indent=1,
    )


def plot(path: str, title: str, sizes: Sequence[GroupSize]) -> None:
    """Padding against ranks, and the layout of the largest unit at the best group size, to scale."""
    try:
        import matplotlib
    except ImportError:
        raise BadInput("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = best_of(sizes)
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 7.5), height_ratios=(1, 1.1), layout="constrained")
    ranks = [size.ranks for size in sizes]
    floor = 0.001  # percent; where no padding at all is drawn
    upper.plot(ranks, [max(floor, 100 * size.padding) for size in sizes], "o-", color="#1b6ca8", label="plan")
    upper.plot(
        ranks, [max(floor, 100 * size.bound) for size in sizes], "_", color="black", markersize=14, label="lower bound"
    )
    upper.axhline(100 * BAD, color="#b03a2e", linewidth=0.8, linestyle="--")
    upper.annotate("3%", (ranks[0], 100 * BAD), xytext=(0, 3), textcoords="offset points", color="#b03a2e", fontsize=9)
    upper.plot(
        [best.ranks], [max(floor, 100 * best.padding)], "o", color="#1e8449", markersize=9, label="best group size"
    )
    upper.set(xscale="log", yscale="log", xlabel="ranks in a group", ylabel="padding, % of the parameters", title=title)
    upper.set_xticks(ranks, [f"{rank:,}" for rank in ranks])
    upper.minorticks_off()
    upper.legend(frameon=False)
    upper.spines[["top", "right"]].set_visible(False)
    index = max(range(len(best.units)), key=lambda i: best.units[i].numel)
    draw_layout(lower, best.plans[index])
    lower.set_title(
        f"{best.units[index].name} over {best.ranks} ranks, padding {percent(best.plans[index].padding_fraction)}"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_layout(axes: Any, plan: BucketPlan, rows: int = 8) -> None:
    """Draw the shards of up to ``rows`` ranks, spread over the group, to scale: a colour for each size of tensor."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch, Rectangle

    world_size = plan.world_size
    ranks = sorted({row * (world_size - 1) // max(1, rows - 1) for row in range(rows)})
    # one colour for each size of tensor, the largest kinds first, so that a tensor keeps its colour in other layouts
    volume: dict[tuple[int, int], int] = {}
    names: dict[tuple[int, int], str] = {}
    for buffer in plan.buffers:
        for (name, _), numel, block in zip(buffer.starts, buffer.numels, buffer.blocks, strict=True):
            volume[numel, block] = volume.get((numel, block), 0) + numel
            names.setdefault((numel, block), f"{name}, blocks of {block:,}")
    palette = [colormaps["tab20"](i) for i in (0, 2, 4, 6, 8, 10, 12, 16, 18, 1, 3, 5, 7, 9, 11, 13, 17, 19)]
    order = sorted(volume, key=lambda kind: (-volume[kind], kind))
    colours = {kind: palette[number % len(palette)] for number, kind in enumerate(order)}
    drawn = set()
    left = 0
    for buffer in plan.buffers:
        for (name, _), numel, block in zip(buffer.starts, buffer.numels, buffer.blocks, strict=True):
            for row, rank in enumerate(ranks):
                lo, hi = buffer.local_range(name, rank)
                if lo == hi:
                    continue
                drawn.add((numel, block))
                place, colour = (left + lo - buffer.owned(rank)[0], row - 0.4), colours[numel, block]
                axes.add_patch(Rectangle(place, hi - lo, 0.8, facecolor=colour, edgecolor="white", linewidth=0.4))
        for row, rank in enumerate(ranks):
            lo, hi = buffer.owned(rank)
            axes.add_patch(Rectangle((left, row - 0.4), hi - lo, 0.8, fill=False, edgecolor="black", linewidth=0.8))
        left += buffer.shard
    axes.set(xlim=(-0.01 * left, 1.01 * left), ylim=(len(ranks) - 0.5, -0.5), ylabel="rank")
    axes.set_xlabel("elements of the rank's shard" + (", one frame for each buffer" if len(plan.buffers) > 1 else ""))
    axes.set_yticks(range(len(ranks)), [f"{rank:,}" for rank in ranks])
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(color=colours[kind], label=names[kind]) for kind in order if kind in drawn][:8]
    handles.append(Patch(facecolor="white", edgecolor="black", label="padding"))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)


class Progress:
    """A bar on a terminal's stderr, once more than a second has passed."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.began = time.monotonic()
        self.shown = False

    def tick(self) -> None:
        self.done += 1
        if sys.stderr.isatty() and time.monotonic() - self.began > 1:
            filled = 40 * self.done // self.total
            print(
                f"\r[{'#' * filled}{'.' * (40 - filled)}] {self.done}/{self.total}", end="", file=sys.stderr, flush=True
            )
            self.shown = True

    def close(self) -> None:
        if self.shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    arguments = OneLineParser(
        prog="ragged-plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("model", help="inventory.json, package.module:function, or a checkpoint folder")
    arguments.add_argument(
        "--ranks", default="8,64,512", help="group sizes, separated by commas (default: %(default)s)"
    )
    arguments.add_argument(
        "--block",
        default="rows=1",
        metavar="BLOCK",
        help="what stays together on a rank: rows=32, elements=1024, slices=1, tile=32x32 or whole, for tensors of two "
        "and more dims; or a policy package.module:function(name, parameter) -> ParamPolicy (default: %(default)s)",
    )
    arguments.add_argument(
        "--replicas", type=int, default=1, help="replicas of each group, HSDP (default: %(default)s)"
    )
    arguments.add_argument(
        "--dtype", choices=sorted(ITEMSIZE), default="bf16", help="of the buffers (default: %(default)s)"
    )
    arguments.add_argument(
        "--unit-regex", help="parameters that match alike are one bucket; for an inventory, taken out of their unit"
    )
    arguments.add_argument(
        "--alignment", type=int, default=128, metavar="BYTES", help="of every shard (default: %(default)s)"
    )
    arguments.add_argument("--max-buffers", type=int, default=3, metavar="N", help="of a bucket (default: %(default)s)")
    arguments.add_argument(
        "--min-saving",
        type=float,
        default=0.01,
        metavar="FRACTION",
        help="that is worth one more buffer (default: %(default)s)",
    )
    arguments.add_argument(
        "--method", choices=("ours", "paper"), default="ours", help="paper: the heuristic of arXiv 2602.22437"
    )
    arguments.add_argument(
        "--json", action="store_true", help="print a list of objects, one for each group size and bucket"
    )
    arguments.add_argument("--layout", action="store_true", help="also print the layout of every bucket as text")
    arguments.add_argument(
        "--plot", metavar="FILE.png", help="also draw padding against ranks, and the largest bucket's layout"
    )
    return arguments


def parse_ranks(text: str) -> list[int]:
    try:
        ranks = [int(rank) for rank in text.split(",")]
    except ValueError:
        raise BadInput(f"--ranks {text}: expected integers separated by commas, such as 8,64,512") from None
    for rank in ranks:
        if rank < 1:
            raise BadInput(f"--ranks {text}: a group has at least 1 rank, not {rank}")
    return sorted(set(ranks))


def read_units(model: str, regex: str | None) -> list[Unit]:
    if regex is not None:
        try:
            re.compile(regex)
        except re.error as error:
            raise BadInput(f"--unit-regex {regex}: {error}") from None
    if os.path.isdir(model):
        return from_checkpoint(model, regex)
    if ":" in model and not os.path.exists(model):
        return from_factory(model, regex)
    units = read_inventory(model)
    return units if regex is None else regrouped(units, regex)


def run(arguments: argparse.Namespace) -> None:
    ranks = parse_ranks(arguments.ranks)
    for name in ("replicas", "alignment", "max_buffers"):
        positive(f"--{name.replace('_', '-')}", "it", getattr(arguments, name))
    if not arguments.min_saving >= 0:
        raise BadInput(f"--min-saving {arguments.min_saving}: a fraction of the bucket, at least 0")
    itemsize = ITEMSIZE[arguments.dtype]
    if arguments.alignment % itemsize:
        raise BadInput(f"--alignment {arguments.alignment} is no multiple of the {itemsize} bytes of {arguments.dtype}")
    options = Options(
        itemsize, arguments.alignment, arguments.max_buffers, arguments.min_saving, arguments.method, arguments.replicas
    )
    block = block_of(arguments.block)
    units = read_units(arguments.model, arguments.unit_regex)
    progress = Progress(len(ranks) * (len(units) + 1))
    sizes = []
    for count in ranks:
        plans = []
        for unit in units:
            plans.append(plan_unit(unit, count, block, options))
            progress.tick()
        sizes.append(GroupSize(count, tuple(units), tuple(plans), options))
    if arguments.json:
        progress.close()
        print(as_json(sizes))
    else:
        reasons = explanations(sizes, arguments.block, block, progress.tick)
        progress.close()
        total = sizes[0].numel
        buckets = sum(unit.count for unit in units)
        print(
            f"{arguments.model}: {total:,} parameters in {buckets} buckets, {arguments.dtype}, "
            f"--block {arguments.block}, shards of a multiple of {arguments.alignment} bytes"
        )
        print("\n" + "\n".join(table(sizes)) + "\n")
        print("\n".join(legend(sizes, options) + reasons))
        if arguments.layout:
            for size in sizes:
                for unit, plan in zip(size.units, size.plans, strict=True):
                    print(f"\n{unit.name} x {unit.count}, {size.ranks} ranks\n{plan}")
    if arguments.plot:
        plot(arguments.plot, f"{os.path.basename(arguments.model)}, --block {arguments.block}", sizes)
        if not arguments.json:
            print(f"\nwritten: {arguments.plot}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 with one line on stderr for bad input."""
    arguments = parser().parse_args(argv)
    try:
        run(arguments)
    except BadInput as error:
        print(f"ragged-plan: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"ragged-plan: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
