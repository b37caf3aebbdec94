"""Weight gradients computed straight into the flat gradient buffer.

Autograd would allocate a weight's gradient and the runtime would copy it to its place in the buffer. Here the product
that *is* the gradient writes to that place, and autograd is handed an alias of it: ``AccumulateGrad`` keeps a fresh
alias as it is, so the parameter's hook finds the gradient already there and fires after all uses, as for any other
gradient.

    F.linear (and its bias), F.embedding, torch.matmul / mm / bmm / grouped_mm with a weight on the right,
    the same with a transpose of a weight: w.t(), w.mT, w.transpose(-2, -1),
    and with a slice of an expert stack: w[i], w.select(0, i), w.unbind(0), iteration

are caught wherever Python calls them, by ``__torch_function__`` of the parameter that the module sees (not within
``F.multi_head_attention_forward``, which is dispatched as a whole). A second use of the same weight in one backward
(tied weights) makes an ordinary gradient: autograd adds it to the alias out of place, and the hook copies the sum. The
ordinary path is also taken under torch.compile, autocast, functorch transforms and ``create_graph=True``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = ["GradientPlace", "WeightParameter", "Witnesses", "will_run", "witnesses_of"]


class Witnesses:
    """Some of the autograd nodes that one forward made: by them one can ask whether a backward comes there.

    Nodes of this file's functions alone: Python owns those, so that a weak reference keeps no graph alive. Where none
    ran (a model of convolutions, or under autocast, torch.compile or torch.func) there is nothing to ask: any backward
    is then taken to cover the forward, and to accumulate, which costs collectives and no correctness as long as all
    ranks judge alike (docs/fsdp.md says where they do not).
    """

    __slots__ = ("_first", "_last")

    def __init__(self) -> None:
        self._first: list[weakref.ref[Any]] = []
        self._last: weakref.ref[Any] | None = None

    def add(self, node: Any) -> None:
        if len(self._first) < 4:
            self._first.append(weakref.ref(node))
        else:
            self._last = weakref.ref(node)

    @property
    def are_gone(self) -> bool:
        """Whether there were any and no graph holds them any more."""
        return bool(self._first) and all(one() is None for one in self._first)

    def will_run(self) -> bool | None:
        """Within a backward: whether it comes to any of them. ``None``: there are none to ask."""
        if not self._first:
            return None
        nodes = [one() for one in (*self._first, *([self._last] if self._last else []))]
        return any(torch._C._will_engine_execute_node(node) for node in nodes if node is not None)

    def leave_out(self) -> bool:
        """Within a backward: whether it comes to one of them and not to what lies behind, as only one that hands
        gradients out does.
        """
        for one in (*self._first, *([self._last] if self._last else [])):
            node = one()
            if node is None or not will_run(node):
                continue
            if not all(will_run(behind) for behind, _ in node.next_functions if behind is not None):
                return True
        return False


def will_run(node: Any) -> bool:
    """Whether the backward under way comes to ``node``. A leaf whose gradient it hands out counts too."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True


_witnesses: Witnesses | None = None


def witnesses_of(forward: Witnesses | None) -> None:
    """Collect the nodes that are made from now on; ``None``: no more."""
    global _witnesses
    _witnesses = forward


def _made(node: Any) -> None:
    if _witnesses is not None:
        _witnesses.add(node)


class GradientPlace:
    """Where the gradient of one unsharded parameter (or of a slice of one) belongs.

    ``claim`` returns that view for the first gradient of a backward, and ``None`` when an ordinary one must be made.
    Not ``wanted``: in this backward nobody does anything with that gradient.
    """

    __slots__ = ("_open", "claimed", "name", "slices", "wanted")

    def __init__(self, open_place: Callable[[], Tensor | None], name: str) -> None:
        self._open = open_place
        self.name = name
        self.claimed = False
        self.wanted = True
        # What this forward has taken so far of a stack, while any of it is alive.
        self.slices: weakref.ref[_Slices] | None = None

    def claim(self, dtype: torch.dtype) -> Tensor | None:
        """The view to write a gradient of ``dtype`` into; the caller must write all of it."""
        if self.claimed or torch.is_grad_enabled():
            return None
        view = self._open()
        if view is None or view.dtype != dtype:
            return None
        self.claimed = True
        return view


class TransposedPlace:
    """The place of a transposed weight. ``claim`` returns the weight's own view, which is not transposed."""

    __slots__ = ("_weight", "claim")

    def __init__(self, weight: GradientPlace) -> None:
        self._weight = weight
        self.claim = weight.claim

    @property
    def wanted(self) -> bool:
        return self._weight.wanted

    @property
    def name(self) -> str:
        return self._weight.name


class WeightParameter(nn.Parameter):
    """The parameter that a module sees while unsharded. ``place`` is set by the bucket that owns the gradient
    buffer.
    """

    place: GradientPlace | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class WeightView(Tensor):
    """A transpose of a weight or a slice of a stack of weights, with the place of its gradient."""

    place: GradientPlace | TransposedPlace | None = None
    slices: _Slices | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        direct = _DIRECT.get(func)
        if direct is not None and _ordinary_autograd():
            result = direct(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _ordinary_autograd() -> bool:
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
        and forward_ad._current_level < 0
    )


def _place(weight: Any) -> GradientPlace | TransposedPlace | None:
    return getattr(weight, "place", None) if isinstance(weight, Tensor) and weight.requires_grad else None


def _own_place(weight: Any) -> GradientPlace | None:
    place = _place(weight)
    return place if isinstance(place, GradientPlace) else None


def _multiplies(input: Any, weight: Tensor) -> bool:
    """Whether the product with ``input`` is one that the functions below know: strided, real, of the weight's dtype."""
    return (
        isinstance(input, Tensor)
        and input.dtype == weight.dtype
        and weight.is_floating_point()
        and input.layout is torch.strided
        and not input.is_nested
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    place = _place(weight)
    if place is None or not _multiplies(input, weight) or input.dim() < 2 or weight.dim() != 2:
        return NotImplemented
    return _Linear.apply(input, weight, bias, place, _own_place(bias))  # type: ignore[no-untyped-call]  # torch's


def _matmul(*args: Any, **kwargs: Any) -> Any:
    if len(args) != 2 or kwargs:  # `out`, `out_dtype`, or matrices by one of their several names
        return NotImplemented
    input, other = args
    place = _place(other)
    if place is None or not _multiplies(input, other):
        return NotImplemented
    stacks = other.dim() == input.dim() == 3 and input.shape[0] == other.shape[0]
    if stacks or (other.dim() == 2 and input.dim() >= 2):
        return _Matmul.apply(input, other, place)  # type: ignore[no-untyped-call]  # torch's
    return NotImplemented


def _grouped(
    input: Tensor | None = None,
    other: Tensor | None = None,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **others: Any,
) -> Any:
    """Rows of ``input`` in groups that end at ``offs``, each with its matrix of a stack (E, K, N)."""
    place = _place(other)
    if (
        place is None
        or input is None
        or other is None
        or others
        or offs is None
        or bias is not None
        or out_dtype not in (None, input.dtype)
        or not _multiplies(input, other)
        or (input.dim(), other.dim()) != (2, 3)
        # Elsewhere the offsets would have to be waited for: the gradient is made by one kernel and written once.
        or input.device.type != "cpu"
    ):
        return NotImplemented
    return _GroupedMatmul.apply(input, other, offs, place)  # type: ignore[no-untyped-call]  # torch's


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    place = _own_place(weight)
    if place is None or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _Embedding.apply(input, weight, padding_idx, place)  # type: ignore[no-untyped-call]  # torch's


def _transpose(input: Tensor, dim0: int, dim1: int) -> Any:
    place, dims = _own_place(input), input.dim()
    if place is None or dims < 2 or not (isinstance(dim0, int) and isinstance(dim1, int)):
        return NotImplemented
    if {dim0 % dims, dim1 % dims} != {dims - 2, dims - 1}:
        return NotImplemented
    return _view(input.transpose(-2, -1), TransposedPlace(place), getattr(input, "slices", None))


def _last_two(input: Tensor) -> Any:
    return _transpose(input, -2, -1)


def _matrix(input: Tensor) -> Any:
    return _transpose(input, 0, 1) if input.dim() == 2 else NotImplemented


def _unbind(input: Tensor, dim: int = 0) -> Any:
    slices = _slices_of(input) if dim == 0 else None
    return NotImplemented if slices is None else tuple(map(slices.weight, range(input.shape[0])))


def _select(input: Tensor, dim: int, index: Any) -> Any:
    return _item(input, index) if dim == 0 else NotImplemented


def _item(input: Tensor, index: Any) -> Any:
    if isinstance(index, Tensor) and index.dim() == 0 and index.dtype in (torch.int64, torch.int32):
        # As torch: a 0-d integer tensor selects.
        index = index.item()
    if type(index) is not int or not -input.shape[0] <= index < input.shape[0]:
        return NotImplemented
    slices = _slices_of(input)
    return NotImplemented if slices is None else slices.weight(index % input.shape[0])


def _view(tensor: Tensor, place: GradientPlace | TransposedPlace, slices: _Slices | None) -> WeightView:
    view = tensor.as_subclass(WeightView)
    view.place, view.slices = place, slices
    return view


_DIRECT: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.mm: _matmul,
    Tensor.bmm: _matmul,
    torch.transpose: _transpose,
    Tensor.transpose: _transpose,
    torch.t: _matrix,
    Tensor.t: _matrix,
    Tensor.T.__get__: _matrix,  # type: ignore[attr-defined]  # the property's getter
    Tensor.mT.__get__: _last_two,  # type: ignore[attr-defined]  # the property's getter
    torch.unbind: _unbind,
    Tensor.unbind: _unbind,
    torch.select: _select,
    Tensor.select: _select,
    Tensor.__getitem__: _item,
}
for _module, _name in ((torch, "_grouped_mm"), (F, "grouped_mm")):
    if hasattr(_module, _name):  # in newer versions only
        _DIRECT[getattr(_module, _name)] = _grouped


_unsafe_view = torch.ops.aten._unsafe_view.default


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _product(place: GradientPlace | TransposedPlace, one: Tensor, other: Tensor) -> Tensor | None:
    """``one @ other`` as a weight gradient: in its place if that is free, in new memory if not."""
    if not place.wanted:
        return None
    multiply = torch.bmm if one.dim() == 3 else torch.mm
    transposed = isinstance(place, TransposedPlace)
    if transposed:
        one, other = other.mT, one.mT
    view = place.claim(one.dtype)
    if view is None:
        product = multiply(one, other)
    else:
        multiply(one, other, out=view)
        # An alias, not the view itself: autograd keeps a gradient without a copy only if nobody else refers to it.
        product = view.detach()
    return product.mT if transposed else product


def _sum(place: GradientPlace | None, rows: Tensor) -> Tensor | None:
    """The sum of the rows as a bias gradient, in its place if that is free."""
    if place is not None and not place.wanted:
        return None
    view = None if place is None else place.claim(rows.dtype)
    if view is None:
        return rows.sum(0)
    torch.sum(rows, 0, out=view)
    return view.detach()


def _through(
    gradient: Tensor, weight: Tensor, place: GradientPlace | TransposedPlace, *, transposed: bool = False
) -> Tensor:
    """The gradient of the input. Raises ``RuntimeError`` where the weight is not there."""
    try:
        return torch.matmul(gradient, weight.mT if transposed else weight)
    except RuntimeError as error:
        if weight.untyped_storage().nbytes():
            raise
        raise RuntimeError(
            f"backward has come to {place.name}, which is not gathered, because no output of this module was met "
            f"before. Outputs are what forward returns: tensors, also in tuples, lists, dicts, sets, dataclasses and "
            f"registered pytrees, or if there are none of those, attributes of what it returns; but nothing that it "
            f"leaves on the module"
        ) from error


# The weight stays on ctx instead of being saved: it is gathered again before backward, so there is no version to check
# and nothing that a checkpoint's hooks would have to pack.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        place: GradientPlace,
        bias_place: GradientPlace | None,
    ) -> Tensor:
        _made(ctx)
        ctx.save_for_backward(input)
        ctx.weight, ctx.place, ctx.bias_place = weight, place, bias_place
        output = F.linear(input, weight, bias)
        # A view (of the rows of all leading dimensions) could not be changed in place afterwards.
        return _unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (input,) = ctx.saved_tensors
        want_input, want_weight, want_bias, *_ = ctx.needs_input_grad
        rows = _rows(gradient)
        return (
            _through(gradient, ctx.weight, ctx.place) if want_input else None,
            _product(ctx.place, rows.t(), _rows(input)) if want_weight else None,
            _sum(ctx.bias_place, rows) if want_bias else None,
            None,
            None,
        )


class _Matmul(torch.autograd.Function):
    """(..., n, k) @ (k, m), or stacks of as many matrices on both sides."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, place: GradientPlace | TransposedPlace) -> Tensor:
        _made(ctx)
        ctx.save_for_backward(input)
        ctx.weight, ctx.place = weight, place
        return torch.matmul(input, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (input,) = ctx.saved_tensors
        want_input, want_weight, _ = ctx.needs_input_grad
        one, other = (input, gradient) if ctx.weight.dim() == 3 else (_rows(input), _rows(gradient))
        return (
            _through(gradient, ctx.weight, ctx.place, transposed=True) if want_input else None,
            _product(ctx.place, one.mT, other) if want_weight else None,
            None,
        )


class _GroupedMatmul(torch.autograd.Function):
    """Rows [offs[e - 1], offs[e]) of (S, K) @ matrix e of (E, K, N)."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, offs: Tensor, place: GradientPlace | TransposedPlace
    ) -> Tensor:
        _made(ctx)
        ctx.save_for_backward(input, offs)
        ctx.weight, ctx.place = weight, place
        return torch._grouped_mm(input, weight, offs=offs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        input, offs = ctx.saved_tensors
        want_input, want_weight, *_ = ctx.needs_input_grad
        weight_gradient = None
        if want_weight and ctx.place.wanted:
            if torch.is_grad_enabled():
                weight_gradient = torch._grouped_mm(input.mT, gradient, offs=offs)
            else:
                weight_gradient = _grouped_product(ctx.place, input, gradient, offs, ctx.weight.shape)
        return (
            torch._grouped_mm(gradient, ctx.weight.mT, offs=offs) if want_input else None,
            weight_gradient,
            None,
            None,
        )


def _grouped_product(
    place: GradientPlace | TransposedPlace, input: Tensor, gradient: Tensor, offs: Tensor, shape: torch.Size
) -> Tensor:
    """The gradient (E, K, N) of the matrices that multiplied groups of rows."""
    view, transposed = place.claim(input.dtype), isinstance(place, TransposedPlace)
    stack = view
    if stack is None:
        stack = input.new_empty(shape[0], *(shape[:0:-1] if transposed else shape[1:]))
    start = 0
    for matrix, end in zip(stack, offs.tolist(), strict=True):
        rows, others = input[start:end], gradient[start:end]
        torch.mm(others.t() if transposed else rows.t(), rows if transposed else others, out=matrix)
        start = end
    stack = stack if view is None else view.detach()
    return stack.mT if transposed else stack


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding_idx: int | None, place: GradientPlace) -> Tensor:
        _made(ctx)
        ctx.save_for_backward(input)
        ctx.rows, ctx.padding_idx, ctx.place = weight.shape[0], padding_idx, place
        return F.embedding(input, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (input,) = ctx.saved_tensors
        padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
        view = ctx.place.claim(gradient.dtype)
        if view is None:
            dense = torch.ops.aten.embedding_dense_backward(gradient, input, ctx.rows, padding_idx, False)
            return None, dense, None, None
        view.zero_().index_add_(0, input.reshape(-1), _rows(gradient))
        if padding_idx >= 0:
            view[padding_idx].zero_()
        return None, view.detach(), None, None


def _slices_of(weight: Tensor) -> _Slices | None:
    """The slices of a stack of matrices. Those taken in one forward come from one node, so that backward meets the
    stack once, however many slices were used.
    """
    place = _own_place(weight)
    if place is None or weight.dim() < 3:
        return None
    slices = None if place.slices is None else place.slices()
    if slices is None or slices.stack.tried:
        stack = _Stack(place)
        slices = _Slices(stack, _Unbind.apply(weight, stack))  # type: ignore[no-untyped-call]  # torch's
        place.slices = weakref.ref(slices)
    return slices


class _Slices:
    """The slices of a stack; alive as long as one that was handed out, so no longer than the graph they are in."""

    def __init__(self, stack: _Stack, tensors: tuple[Tensor, ...]) -> None:
        self.stack, self.tensors = stack, tensors

    def weight(self, index: int) -> WeightView:
        return _view(self.tensors[index], self.stack.place_of(index), self)


class _Stack:
    """The place of a stack, handed out slice by slice once the stack itself is free.

    The autograd node of the slices holds it; it must not hold the slices, which hold that node.
    """

    def __init__(self, place: GradientPlace) -> None:
        self.place = place
        self.view: Tensor | None = None
        self.tried = False
        self.dtype = torch.float32
        self.places: dict[int, GradientPlace] = {}

    def place_of(self, index: int) -> GradientPlace:
        if index not in self.places:
            self.places[index] = GradientPlace(lambda: self._slice(index), self.place.name)
        return self.places[index]

    def open(self, dtype: torch.dtype) -> Tensor | None:
        if not self.tried:
            self.tried = True
            self.view = self.place.claim(dtype)
        return self.view

    def _slice(self, index: int) -> Tensor | None:
        view = self.open(self.dtype)
        return None if view is None else view[index]

    def close(self) -> None:
        self.view, self.tried = None, False
        for one in self.places.values():
            one.claimed = False


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, stack: _Stack) -> tuple[Tensor, ...]:
        ctx.stack, ctx.shape = stack, weight.shape[1:]
        stack.dtype = weight.dtype
        ctx.set_materialize_grads(False)
        return tuple(weight.unbind(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        stack: _Stack = ctx.stack
        present = next((g for g in gradients if g is not None), None)
        if present is None:
            stack.close()
            return None, None
        view = None if torch.is_grad_enabled() else stack.open(present.dtype)
        if view is None:
            stack.close()
            return torch.stack([present.new_zeros(ctx.shape) if g is None else g for g in gradients]), None
        for place, gradient in zip(view, gradients, strict=True):
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr() or gradient.stride() != place.stride():
                place.copy_(gradient)
        stack.close()
        return view.detach(), None
