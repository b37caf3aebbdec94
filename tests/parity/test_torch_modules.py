"""torch's own layers that hold or use their parameters in ways of their own: recurrent, attention, convolution, lists,
parametrizations.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.utils import parametrizations

from fsdp import MixedPrecisionPolicy, fully_shard
from tests import cluster
from tests.fsdp.reference import shard_children, train
from tests.parity.ddp import MIXED, train_beside_ddp

N = 8


def sequence(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(3, 5, N, generator=generator)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(N, N, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * N, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(N, 2, 16, dropout=0.0, batch_first=True, norm_first=True), 2
        )
        self.attention = nn.MultiheadAttention(N, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.attention(x, x, x, need_weights=False)[0]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(N, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer(x, x.flip(1))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(5, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.Conv1d(6, 4, 3, groups=2),
            nn.BatchNorm1d(4),
        )
        self.up = nn.ConvTranspose1d(4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.body(x))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(N, N)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(N)), "b": nn.Parameter(torch.randn(()))})
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x * self.named["a"] + self.named["b"]


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(N, N))
        self.b = parametrizations.orthogonal(nn.Linear(N, N))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.act = nn.Bilinear(N, N, 4), nn.PReLU(4)
        self.bag = nn.EmbeddingBag(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.mix(x, x.flip(0)).transpose(1, 2)) + self.bag(torch.arange(6).view(3, 2))[:, :, None]


MODELS = {
    "LSTM": partial(Recurrent, "LSTM"),
    "GRU": partial(Recurrent, "GRU"),
    "attention": Attention,
    "transformer": Whole,
    "convolution": Convolutional,
    "lists": Lists,
    "parametrized": Parametrized,
    "bilinear": Bilinear,
}


def shard(model: nn.Module, wrap: str, **options: Any) -> nn.Module:
    if wrap == "layers" and isinstance(model, (Attention, Whole)):
        for module in list(model.modules()):
            if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                fully_shard(module, **options)
        return fully_shard(model, **options)
    if wrap == "layers" and not isinstance(model, Lists):
        return shard_children(model, **options)
    return fully_shard(model, **options)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(sequence(step)).square().mean()


def trained(name: str, wrap: str) -> list[str]:
    return train(MODELS[name], loss_of, partial(shard, wrap=wrap), tolerance=1e-5)


@pytest.mark.parametrize("wrap", ["layers", "root"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_plain_data_parallelism(name: str, wrap: str) -> None:
    assert cluster.run(2, trained, name, wrap) == [[], []]


def beside_ddp(name: str, checkpointed: bool, low: bool) -> list[str]:
    torch.manual_seed(0)
    plain = MODELS[name]()
    for module in plain.modules():
        if low and isinstance(module, nn.BatchNorm1d):
            # torch has no batch norm of bfloat16 with running averages in fp32.
            module.running_mean, module.running_var = module.running_mean.bfloat16(), module.running_var.bfloat16()
    if checkpointed:
        layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Conv1d, nn.GroupNorm, nn.BatchNorm1d)
        apply_activation_checkpointing(plain, check_fn=lambda module: isinstance(module, layers))
    model = shard(copy.deepcopy(plain), "layers", mp_policy=MIXED if low else MixedPrecisionPolicy())

    def loss(one: nn.Module, step: int) -> Tensor:
        x = sequence(step)
        return one(x if one is model or not low else x.bfloat16()).float().square().mean()

    return train_beside_ddp(model, plain, loss, low=low)


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", ["transformer", "convolution"])
def test_trains_as_ddp_with_checkpoints_and_in_bfloat16(name: str, checkpointed: bool, low: bool) -> None:
    assert cluster.run(2, beside_ddp, name, checkpointed, low) == [[], []]


def evaluated(name: str) -> list[str]:
    """eval() and inference take other code paths (fused attention, cached weights)."""
    torch.manual_seed(0)
    plain = MODELS[name]().eval()
    model = shard(copy.deepcopy(plain), "layers").eval()
    with torch.no_grad():
        for one in (model, plain):
            for parameter in one.parameters():
                parameter.mul_(0.5)
        worst = (model(sequence(0)) - plain(sequence(0))).abs().max().item()
    return [] if worst < 1e-5 else [f"off by {worst}"]


@pytest.mark.parametrize("name", MODELS)
def test_evaluation(name: str) -> None:
    assert cluster.run(2, evaluated, name) == [[], []]
