"""ParamPolicy: a value; and what a policy function may return."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from ragged_shard import Block, ParamPolicy
from ragged_shard.policy import apply_policy

PARAMETER = SimpleNamespace(shape=(6, 4))


def test_fields() -> None:
    policy = ParamPolicy(block=Block.rows(2), optimizer="muon", lr=0.02, momentum=0.9)
    assert policy.block == Block.rows(2) and policy.optimizer == "muon"
    assert dict(policy.hyperparameters) == {"lr": 0.02, "momentum": 0.9}
    assert repr(policy) == "ParamPolicy(block=rows(2), optimizer='muon', lr=0.02, momentum=0.9)"
    assert repr(ParamPolicy()) == "ParamPolicy()"


def test_immutable() -> None:
    policy = ParamPolicy(lr=0.1)
    with pytest.raises(AttributeError, match="immutable"):
        policy.block = Block.whole()
    with pytest.raises(TypeError):
        policy.hyperparameters["lr"] = 0.2  # type: ignore[index]


def test_compared_hashed_and_pickled_by_value() -> None:
    one, same = (ParamPolicy(block=Block.rows(2), lr=0.1) for _ in range(2))
    others = [ParamPolicy(block=Block.rows(3), lr=0.1), ParamPolicy(block=Block.rows(2), lr=0.2), ParamPolicy(), 3]
    assert one == same and hash(one) == hash(same)
    assert all(one != other for other in others)
    assert pickle.loads(pickle.dumps(one)) == one
    # Hyperparameters need not be hashable.
    hash(ParamPolicy(betas=[0.9, 0.99]))


@pytest.mark.parametrize("block", [4, "rows", (2, 2), Block])
def test_block_must_be_a_block(block: Any) -> None:
    with pytest.raises(TypeError, match=r"Block\.rows\(32\)"):
        ParamPolicy(block=block)


@pytest.mark.parametrize("optimizer", [3, Block.whole(), object()])
def test_optimizer_must_be_a_name_or_a_class(optimizer: Any) -> None:
    with pytest.raises(TypeError, match="name of a rule"):
        ParamPolicy(optimizer=optimizer)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        ParamPolicy(Block.whole())  # type: ignore[misc]


def test_no_policy_and_none_are_the_default() -> None:
    assert apply_policy(None, "w", PARAMETER) == ParamPolicy()
    assert apply_policy(lambda n, p: None, "w", PARAMETER) == ParamPolicy()


def test_the_function_gets_name_and_parameter() -> None:
    seen = []
    apply_policy(lambda *args: seen.append(args), "w", PARAMETER)
    assert seen == [("w", PARAMETER)]


@pytest.mark.parametrize("answer", ["muon", Block.rows(2), {"block": None}, 7, False])
def test_any_other_answer_names_the_parameter(answer: Any) -> None:
    with pytest.raises(TypeError, match=r"'layer\.w'.*ParamPolicy"):
        apply_policy(lambda n, p: answer, "layer.w", PARAMETER)


def test_a_block_that_does_not_fit_names_the_parameter() -> None:
    stack = SimpleNamespace(shape=(3, 10, 4))
    with pytest.raises(ValueError, match=r"'experts\.w'.*tile\(4, 4\).*divisor of 10"):
        apply_policy(lambda n, p: ParamPolicy(block=Block.tile(4, 4)), "experts.w", stack)


def raises(error: Exception) -> Any:
    def policy(name: str, parameter: Any) -> ParamPolicy:
        raise error

    return policy


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("bad"), ZeroDivisionError("bad"), UnicodeError("bad")])
def test_what_the_policy_raises_names_the_parameter(error: Exception) -> None:
    with pytest.raises(Exception, match=r"bad") as caught:
        apply_policy(raises(error), "layer.w", PARAMETER)
    assert "layer.w" in str(caught.value)
    chain = caught.value
    while chain is not None and chain is not error:
        chain = chain.__cause__  # type: ignore[assignment]
    assert chain is error or type(caught.value) is type(error)
