"""``python -m ragged_shard.doctor``: each hook, the part of torch that it replaces, and whether that fits.

Looks only; installs nothing. Exits with 1 when something does not fit. ``--operators`` prints what each operator does
with a RaggedShard instead, as the table of ``docs/ragged_shard.md``.
"""

from __future__ import annotations

import sys

import torch

from ragged_shard.install import HOOKS, NEWEST, OLDEST, probe

__all__ = ["main", "operator_table", "report"]


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
        elif not hook.is_needed():
            status = "not needed"
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


MEANING = {
    "elementwise": "keeps the placement; values of a row or of all rows broadcast; replicated operands are cut",
    "reduction": "over everything or the whole flattened prefix: Partial; inside a unit: stays ragged; else refused",
    "random": "the values, and the generator, of one process",
    "shape": "like the tensor, or a view that keeps the flattened prefix whole",
    "refused": "refused with advice, like everything that is not in this table",
}


def operator_table() -> str:
    """Markdown, made from the registrations of ``propagation.py``: family, what it means, operators."""
    from ragged_shard import placement  # noqa: F401  (installs, and so registers)
    from ragged_shard.propagation import TABLE

    rows = ["| family | with a RaggedShard | operators |", "|---|---|---|"]
    for family, meaning in MEANING.items():
        names = {op._schema.name.partition("::")[2] for op in TABLE[family]}
        shown = [f"`{name}`" for name in sorted(names)]
        if family == "elementwise":
            shown = ["every operator that torch tags `pointwise`", "`_foreach_*`", "`_fused_*`", "`_amp_*`", *shown]
        if family == "reduction":
            shown += ["`_foreach_norm`", "`_foreach_max`"]
        rows.append(f"| {family} | {meaning} | {', '.join(shown)} |")
    return "\n".join(rows)


def main() -> int:
    if sys.argv[1:] == ["--operators"]:
        print(operator_table())
        return 0
    text, healthy = report()
    print(text)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
