"""The text and its order: the same for everyone, whatever the number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import corpus


@pytest.fixture(scope="module")
def library() -> corpus.Corpus:
    return corpus.load(None, 64)


def folder_of(path: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(text)
    return path


def test_the_standard_library_is_read_the_same_way_each_time(library: corpus.Corpus) -> None:
    again = corpus.load(None, 64)
    assert again.digest == library.digest
    assert torch.equal(again.train, library.train)
    assert 5e6 < library.train.numel() < 50e6
    assert 0.02 < library.valid.numel() / library.train.numel() < 0.2


def test_order_does_not_depend_on_the_order_of_the_file_system(tmp_path: Path) -> None:
    texts = {f"{'xyz'[i % 3]}/{i}.txt": bytes([i]) * (100 + i) for i in range(40)}
    one = corpus.load(str(folder_of(tmp_path / "one", texts)), 16)
    other = corpus.load(str(folder_of(tmp_path / "other", dict(reversed(texts.items())))), 16)
    assert one.digest == other.digest


def test_no_file_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    texts = {f"{i}.txt": bytes([i]) * 200 for i in range(1, 41)}
    text = corpus.load(str(folder_of(tmp_path, texts)), 16)
    train, valid = ({int(b) for b in part.unique()} - {0} for part in (text.train, text.valid))
    assert not train & valid
    assert len(valid) == 2
    assert train | valid == set(range(1, 41))


def test_of_a_single_file_the_end_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(250)) * 8)
    text = corpus.load(str(file), 16)
    assert torch.cat((text.train, text.valid)).tolist() == list(file.read_bytes())
    assert text.valid.numel() == 100


def test_hidden_files_are_not_text(tmp_path: Path) -> None:
    plain = {"a.txt": b"a" * 900, "b.txt": b"b" * 900}
    expected = corpus.load(str(folder_of(tmp_path / "plain", plain)), 16)
    with_git = corpus.load(str(folder_of(tmp_path / "git", plain | {".git/x": b"x" * 900, ".secret": b"s" * 900})), 16)
    assert with_git.digest == expected.digest


@given(seed=st.integers(0, 2**32), step=st.integers(0, 10**7), samples=st.integers(1, 40), ranks=st.integers(1, 8))
def test_the_batch_is_the_same_however_many_ranks_share_it(seed: int, step: int, samples: int, ranks: int) -> None:
    text = torch.arange(1000).remainder(251).to(torch.uint8)
    tokens, targets = corpus.batch(text, 12, seed, step, range(samples))
    shares = [range(samples * rank // ranks, samples * (rank + 1) // ranks) for rank in range(ranks)]
    parts = [corpus.batch(text, 12, seed, step, share) for share in shares]
    assert torch.equal(torch.cat([part[0] for part in parts]), tokens)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_batches_differ_by_seed_step_and_sample_and_reach_the_whole_text() -> None:
    starts = {corpus.scramble(seed, step, i) % 10**9 for seed in range(8) for step in range(8) for i in range(8)}
    assert len(starts) == 8**3
    # With windows of a thousand positions, 20,000 draws miss one with probability 2e-6.
    assert {corpus.scramble(0, 0, i) % 1000 for i in range(20_000)} == set(range(1000))
    # So that a change of the hash, which would change every run, does not go unseen.
    assert corpus.scramble(0, 0, 0) == PINNED


PINNED = 2558736989570252433


def test_validation_windows_are_spread_over_the_text_and_split_like_batches() -> None:
    text = torch.arange(256, dtype=torch.uint8)
    tokens, targets = corpus.validation_batch(text, 16, range(10), 10)
    assert tokens[0, 0] == 0
    assert targets[-1, -1] == 255
    assert torch.equal(torch.cat([corpus.validation_batch(text, 16, [i], 10)[0] for i in range(10)]), tokens)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "nothing", ["nothing", "no such file", "--data"]),
        (lambda path: folder_of(path, {}), ["no file with text", "--data"]),
        (lambda path: folder_of(path, {"a.txt": b""}) / "a.txt", ["a.txt", "is empty", "--data"]),
        (lambda path: folder_of(path, {"a.txt": b"short"}) / "a.txt", ["a.txt", "too short", "--model"]),
        (lambda path: folder_of(path, {"a": b"x" * 500, "b": b"x"}), ["too short", "hold out"]),
    ],
)
def test_text_that_cannot_be_used_is_named(tmp_path: Path, make: object, words: list[str]) -> None:
    with pytest.raises(corpus.CorpusError) as error:
        corpus.load(str(make(tmp_path)), 64)  # type: ignore[operator]
    assert all(word in str(error.value) for word in words), error.value
