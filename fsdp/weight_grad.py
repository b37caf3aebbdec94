"""Weight gradients computed straight into the flat gradient buffer.

Autograd would allocate a weight's gradient and the runtime would copy it to its place in the buffer. Here the product
that *is* the gradient writes to that place, and autograd is handed an alias of it: ``AccumulateGrad`` keeps a fresh
alias as it is, so the parameter's hook finds the gradient already there and fires after all uses, as for any other
gradient.

    F.linear (and its bias), F.embedding, torch.matmul / mm / bmm with a weight on the right,
    stack.unbind(0) and iteration over an expert stack, then linear or matmul with a slice

are caught wherever they are called, by ``__torch_function__`` of the parameter that the module sees. A second use of
the same weight in one backward (tied weights) makes an ordinary gradient: autograd adds it to the alias out of place,
and the hook copies the sum. The ordinary path is also taken under torch.compile, autocast, functorch transforms and
``create_graph=True``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GradientPlace", "WeightParameter"]


class GradientPlace:
    """Where the gradient of one unsharded parameter (or of a slice of one) belongs.

    ``claim`` returns that view for the first gradient of a backward, and ``None`` when an ordinary one must be made.
    """

    __slots__ = ("_open", "claimed")

    def __init__(self, open_place: Callable[[], Tensor | None]) -> None:
        self._open = open_place
        self.claimed = False

    def claim(self, dtype: torch.dtype) -> Tensor | None:
        """The view to write a gradient of ``dtype`` into; the caller must write all of it."""
        if self.claimed or torch.is_grad_enabled():
            return None
        view = self._open()
        if view is None or view.dtype != dtype:
            return None
        self.claimed = True
        return view


class WeightParameter(nn.Parameter):
    """The parameter that a module sees while unsharded. ``place`` is set by the bucket that owns the gradient
    buffer.
    """

    place: GradientPlace | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class WeightSlice(Tensor):
    """A slice of a stack of weights that ``unbind`` handed out, with the slice's place."""

    place: GradientPlace | None = None

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
    )


def _place(weight: Any) -> GradientPlace | None:
    return getattr(weight, "place", None) if isinstance(weight, Tensor) and weight.requires_grad else None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    place = _place(weight)
    if place is None or input.dim() < 2 or weight.dim() != 2 or input.dtype != weight.dtype or input.is_sparse:
        return NotImplemented
    return _Linear.apply(input, weight, bias, place, _place(bias))  # type: ignore[no-untyped-call]


def _matmul(input: Tensor, other: Tensor) -> Any:
    place = _place(other)
    if place is None or not isinstance(input, Tensor) or input.dtype != other.dtype or input.is_sparse:
        return NotImplemented
    if other.dim() == 2 and input.dim() >= 2:
        return _Matmul.apply(input, other, place)  # type: ignore[no-untyped-call]
    if other.dim() == 3 and input.dim() == 3 and input.shape[0] == other.shape[0]:
        return _BatchedMatmul.apply(input, other, place)  # type: ignore[no-untyped-call]
    return NotImplemented


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    place = _place(weight)
    if place is None or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _Embedding.apply(input, weight, padding_idx, place)  # type: ignore[no-untyped-call]


def _unbind(input: Tensor, dim: int = 0) -> Any:
    place = _place(input)
    if place is None or dim != 0 or input.dim() < 3:
        return NotImplemented
    stack = _StackPlace(place, input.shape[0])
    slices = _Unbind.apply(input, stack)  # type: ignore[no-untyped-call]
    found = []
    for index, one in enumerate(slices):
        weight = one.as_subclass(WeightSlice)
        weight.place = stack.slices[index]
        found.append(weight)
    return tuple(found)


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
    torch.unbind: _unbind,
    Tensor.unbind: _unbind,
}


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _product(place: GradientPlace, one: Tensor, other: Tensor) -> Tensor:
    """``one @ other`` as a weight gradient: in its place if that is free, in new memory if not."""
    multiply = torch.bmm if one.dim() == 3 else torch.mm
    view = place.claim(one.dtype)
    if view is None:
        return multiply(one, other)
    multiply(one, other, out=view)
    # An alias, not the view itself: autograd keeps a gradient without a copy only if nobody else refers to it.
    return view.detach()


def _sum(place: GradientPlace | None, rows: Tensor) -> Tensor:
    """The sum of the rows as a bias gradient, in its place if that is free."""
    view = None if place is None else place.claim(rows.dtype)
    if view is None:
        return rows.sum(0)
    torch.sum(rows, 0, out=view)
    return view.detach()


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
        ctx.save_for_backward(input)
        ctx.weight, ctx.place, ctx.bias_place = weight, place, bias_place
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (input,) = ctx.saved_tensors
        want_input, want_weight, want_bias, *_ = ctx.needs_input_grad
        rows = _rows(gradient)
        return (
            torch.matmul(gradient, ctx.weight) if want_input else None,
            _product(ctx.place, rows.t(), _rows(input)) if want_weight else None,
            _sum(ctx.bias_place, rows) if want_bias else None,
            None,
            None,
        )


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, place: GradientPlace) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.place = weight, place
        return torch.matmul(input, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (input,) = ctx.saved_tensors
        want_input, want_weight, _ = ctx.needs_input_grad
        return (
            torch.matmul(gradient, ctx.weight.t()) if want_input else None,
            _product(ctx.place, _rows(input).t(), _rows(gradient)) if want_weight else None,
            None,
        )


class _BatchedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, place: GradientPlace) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.place = weight, place
        return torch.bmm(input, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (input,) = ctx.saved_tensors
        want_input, want_weight, _ = ctx.needs_input_grad
        return (
            torch.bmm(gradient, ctx.weight.transpose(1, 2)) if want_input else None,
            _product(ctx.place, input.transpose(1, 2), gradient) if want_weight else None,
            None,
        )


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding_idx: int | None, place: GradientPlace) -> Tensor:
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


class _StackPlace:
    """The place of a stack, handed out slice by slice once the stack itself is free."""

    def __init__(self, place: GradientPlace, count: int) -> None:
        self.place = place
        self.view: Tensor | None = None
        self.tried = False
        self.slices = [GradientPlace(lambda index=index: self._slice(index)) for index in range(count)]  # type: ignore[misc]

    def open(self, dtype: torch.dtype) -> Tensor | None:
        if not self.tried:
            self.tried = True
            self.view = self.place.claim(dtype)
        return self.view

    def _slice(self, index: int) -> Tensor | None:
        view = self.open(self.dtype)
        return None if view is None else view[index]

    dtype: torch.dtype = torch.float32

    def close(self) -> None:
        self.view, self.tried = None, False
        for one in self.slices:
            one.claimed = False


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, stack: _StackPlace) -> tuple[Tensor, ...]:
        ctx.stack, ctx.shape = stack, weight.shape[1:]
        stack.dtype = weight.dtype
        ctx.set_materialize_grads(False)
        return tuple(weight.unbind(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        stack: _StackPlace = ctx.stack
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
