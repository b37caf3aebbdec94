"""Fully sharded data parallel training: torch's ``fully_shard`` API over RaggedShard buffers, with zero copies."""

from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

from fsdp.clip import clip_grad_norm_
from fsdp.fully_shard import fully_shard
from fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from fsdp.report import memory_report
from ragged_shard.block import Block
from ragged_shard.policy import ParamPolicy

__all__ = [
    "Block",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParamPolicy",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "memory_report",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
