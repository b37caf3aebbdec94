"""Gradient clipping over parameters on several meshes. On one mesh ``torch.nn.utils.clip_grad_norm_`` is enough."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their norm, taken over all of them and all ranks, is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, but parameters may lie on different meshes or on none
    (pytorch/pytorch#180346). Every rank of every mesh must call it with the same parameters in the same order.

    Returns the norm before clipping: a plain 0-d tensor, equal on all ranks, of the gradients' dtype or float32, the
    wider one.
    Raises ``RuntimeError`` with ``error_if_nonfinite`` when that norm is nan or inf.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    by_mesh: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norm_type = float(norm_type)
    norms = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(group, norm_type, error_if_nonfinite=False, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    dtype = functools.reduce(torch.promote_types, [norm.dtype for norm in norms], torch.float32)
    stacked = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    # The norm of order 0 is a number of gradients that are not zero, which add up.
    total = stacked.sum() if norm_type == 0 else torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {total.item()}; pass error_if_nonfinite=False to scale by it"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for group in by_mesh.values():
        locals_ = [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in group]
        torch._foreach_mul_(locals_, factor.to(locals_[0].device))
    return total
