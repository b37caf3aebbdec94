"""Real text that is always there: the source files of the running interpreter's standard library, or ``--data PATH``.

Text is bytes. Which files are held out for validation depends on their names alone; sample ``i`` of step ``t`` is a
pure function of (seed, t, i), so the global batch and its order do not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SEPARATOR = b"\0"
HELD_OUT = 20  # one file (or, of a single file, one byte) in so many is kept for validation
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__"}


class CorpusError(ValueError):
    """The text cannot be used; the message names the file and what to do."""


@dataclass(frozen=True)
class Corpus:
    name: str
    train: Tensor  # 1-D uint8
    valid: Tensor  # 1-D uint8
    digest: str  # of both, so that a resumed run can tell that it sees the same text

    def __str__(self) -> str:
        return f"{self.name}: {self.train.numel():,} bytes to train on, {self.valid.numel():,} held out"


def load(path: str | None, context: int) -> Corpus:
    """The corpus at ``path`` (a file, or a folder of files; ``None``: the standard library).

    Raises ``CorpusError`` for what is missing, unreadable or too short for windows of ``context + 1`` bytes.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in root.rglob("*.py") if not SKIPPED_FOLDERS.intersection(p.relative_to(root).parts)]
        name = "Python standard library"
    else:
        root, name = Path(path), str(path)
        if not root.exists():
            raise CorpusError(f"{path}: no such file or folder; give --data the path of a text, or leave it out")
        files = [p for p in root.rglob("*") if p.is_file() and not hidden(p, root)] if root.is_dir() else [root]
    texts = {p.relative_to(root).as_posix(): read(p) for p in files}
    texts = {file: texts[file] for file in sorted(texts) if texts[file]}
    if not texts:
        what = "has no file with text in it" if root.is_dir() else "is empty"
        raise CorpusError(f"{root}: {what}; give --data a file or folder that has, or leave it out")
    train, valid = split(texts)
    for part, text in (("train on", train), ("hold out", valid)):
        if len(text) <= context + 1:
            raise CorpusError(
                f"{root}: too short: {len(text)} bytes to {part}, and this model reads windows of {context + 1}; "
                f"give --data more text (about {HELD_OUT * (context + 2)} bytes at least) or choose a smaller --model"
            )
    digest = hashlib.sha256(train + b"\xff" + valid).hexdigest()[:16]
    # A bytearray, because torch warns about tensors over memory that it may not write.
    return Corpus(name, *(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, valid)), digest)


def hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CorpusError(
            f"{file}: cannot be read ({error.strerror}); make it readable or give --data another path"
        ) from None


def split(texts: dict[str, bytes]) -> tuple[bytes, bytes]:
    """Train and validation text of the files, in the order of their names; of a single file, its end is held out."""
    if len(texts) == 1:
        (text,) = texts.values()
        cut = len(text) - len(text) // HELD_OUT
        return text[:cut], text[cut:]
    by_hash = sorted(texts, key=lambda file: hashlib.sha256(file.encode()).digest())
    held_out = set(by_hash[: max(1, len(texts) // HELD_OUT)])
    return (
        SEPARATOR.join(text for file, text in texts.items() if file not in held_out),
        SEPARATOR.join(text for file, text in texts.items() if file in held_out),
    )


def batch(text: Tensor, context: int, seed: int, step: int, samples: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Samples ``samples`` of the global batch of ``step``: tokens and targets [len(samples), context], int64."""
    windows = text.numel() - context
    return cut(text, context, [scramble(seed, step, i) % windows for i in samples])


def validation_batch(text: Tensor, context: int, samples: Iterable[int], total: int) -> tuple[Tensor, Tensor]:
    """Windows ``samples`` out of ``total`` evenly spread ones."""
    return cut(text, context, [i * (text.numel() - context - 1) // max(1, total - 1) for i in samples])


def cut(text: Tensor, context: int, starts: list[int]) -> tuple[Tensor, Tensor]:
    if not starts:
        empty = torch.empty(0, context, dtype=torch.int64)
        return empty, empty
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def scramble(*numbers: int) -> int:
    """A 64-bit hash of a few integers (splitmix64 after each): as good as random, the same on every machine."""
    mask, state = 2**64 - 1, 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state
