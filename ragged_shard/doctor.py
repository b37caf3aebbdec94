"""``python -m ragged_shard.doctor``: each hook, the part of torch that it replaces, and whether that fits.

Looks only; installs nothing. Exits with 1 when something does not fit.
"""

from __future__ import annotations

import sys

import torch

from ragged_shard.install import HOOKS, NEWEST, OLDEST, probe

__all__ = ["main", "report"]


def report() -> tuple[str, bool]:
    """The report and whether everything fits."""
    lines = [
        f"torch {torch.__version__}; ragged_shard fits {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1] - 1}",
        f"{len(HOOKS)} hooks:",
    ]
    healthy = True
    for hook in HOOKS:
        wrong = probe((hook,), shared=False)
        healthy = healthy and not wrong
        if wrong:
            status = "MISFIT"
        else:
            status = "installed" if hook.is_installed() else "fits"
        lines.append(f"  {status:<10} {hook.path}")
        lines.append(f"  {'':<10} without it: {hook.why}")
        lines += [f"  {'':<10} {problem}" for problem in wrong]
    others = probe(())
    healthy = healthy and not others
    lines.append("types, C++ symbols, other patches: " + ("fit" if not others else "MISFIT"))
    lines += [f"  {problem}" for problem in others]
    return "\n".join(lines), healthy


def main() -> int:
    text, healthy = report()
    print(text)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
