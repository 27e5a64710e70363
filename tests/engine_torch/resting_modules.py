"""Trains, saves and loads modules whose weights rest as codes, and writes docs/sameness-resting.md; fails where anything differs.

    python -m tests.engine_torch.resting_modules [--only TEXT] [--missing]

With ``--only``, only cases with the text in their names are trained; with ``--missing``, only those that the page lacks. Other lines stay. ``bytes RECIPE`` is
the name of the case that counts what two ranks gather of a layer of Llama-3-8B.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import ROOT
from tests.engine_torch.meeting import in_group
from tests.engine_torch.own_resting import MESHES, trained_bytes
from tests.engine_torch.ranks import RankError, Ranks
from tests.engine_torch.resting_cases import CASES, MANY_STEPS, RestingCase, checked, planned_bytes

PAGE = ROOT / "docs" / "sameness-resting.md"
HEAD = f"""# Weights that rest as codes, on every mesh

All [modules](modules.md) that multiply, column-parallel, row-parallel and replicated, whose weights [rest as codes](modules.md#weights-that-rest-as-codes), under every recipe on
`fsdp` (4 ranks), `tp` (fsdp 2 x tp 2), `hsdp` (2 x 2), and `all` (replicas 2 x fsdp 2 x tp 2, where the axis of replicas is called `shard`).

In each case

- the state after `reset_parameters`, codes and scales included, has the bits of one process: so many tensors;
- in {MANY_STEPS} steps of AdamW with clipping, outputs and gradients have the bits of modules with the same main weights, which are gathered in
  high precision and quantized after;
- a save, by `save` and by `torch.distributed.checkpoint`, is loaded onto each of these meshes and in one process, and what was loaded is saved again: codes,
  scales, main weights, moments and delayed scaling have the bits of the first save, in so many loads;
- on the same mesh the next output has the same bits. The last column is how far another mesh moves it, as a share of its norm: ranks add sums in
  another order, which may move a code to its neighbour; and `fp8-delayed` measures factors anew where another number of ranks has tokens.

`python -m tests.engine_torch.resting_modules` measures all again and writes this page, as part of `make test-all`.

| recipe | mesh | tensors | loads | next output moved |
|---|---|---:|---:|---:|
"""

BYTES = """
## Bytes

A layer of Llama-3-8B, seven matrices with 218,103,808 elements, on two ranks of `fully_shard`: what a rank has at rest, and each of its two all-gathers in a step, as
PyTorch's profiler has them. Both equal the plan of that model with `rest_quantized`, to the byte.

| | recipe | at rest on a rank | an all-gather | for each element |
|---|---|---:|---:|---:|
"""
OF_BYTES = ("fp8-block", "fp8-current", "nvfp4", "mxfp8", "fp8-row")
LLAMA3_8B = (4096, 14336, 1024)
"""The widths of a layer: of tokens, of hidden units, of keys."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--missing", action="store_true")
    options = parser.parse_args()
    lines = kept()
    named = {**{str(case): case for case in CASES}, **{f"bytes {recipe}": recipe for recipe in OF_BYTES}}
    wanted = {
        name: case for name, case in named.items() if options.only in name and not (options.missing and name in lines)
    }
    start, wrong = time.monotonic(), False
    ranks = Ranks(8, in_group, limit_s=1200)
    try:
        for number, (name, case) in enumerate(wanted.items(), 1):
            try:
                lines[name] = measured(case, ranks)
            except (AssertionError, RankError) as error:
                print(f"not the same: {name}: {error}", file=sys.stderr, flush=True)
                wrong = True
                continue
            print(f"{time.monotonic() - start:6.0f} s {number:2d}/{len(wanted)} {lines[name]}", end="", flush=True)
            keep(lines)
    finally:
        ranks.end()
    return 1 if wrong else 0


def measured(case: RestingCase | str, ranks: Ranks) -> str:
    """A line of the page."""
    if isinstance(case, RestingCase):
        with tempfile.TemporaryDirectory() as folder:
            result = checked(case, ranks, Path(folder), MANY_STEPS, list(MESHES))
        return f"| `{case.recipe}` | {case.kind} | {result.codes} | {result.loads} | {result.moved:.1e} |\n"
    planned = planned_bytes(case, *LLAMA3_8B, 2)
    for gathers, at_rest in ranks.first(2).run(trained_bytes, case, *LLAMA3_8B):
        assert gathers == [planned.gathered] * 2, (gathers, planned)
        assert at_rest == planned.at_rest, (at_rest, planned)
    width, hidden, kv_width = LLAMA3_8B
    elements = 2 * width * width + 2 * kv_width * width + 3 * hidden * width
    gathered = f"{planned.gathered:,} | {planned.gathered / elements:.4f}"
    return f"| bytes | `{case}` | {planned.at_rest:,} | {gathered} |\n"


def kept() -> dict[str, str]:
    """The lines of the page."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    names = {*map(str, CASES), *(f"bytes {recipe}" for recipe in OF_BYTES)}
    by_name = {
        " ".join(cell.strip(" `") for cell in line.split("|")[1:3]): line for line in text.splitlines(keepends=True)
    }
    return {name: line for name, line in by_name.items() if name in names}


def keep(lines: dict[str, str]) -> None:
    order = [str(case) for case in CASES]
    of_bytes = [f"bytes {recipe}" for recipe in OF_BYTES]
    missing = [name for name in (*order, *of_bytes) if name not in lines]
    note = f"\nNot measured yet: {', '.join(missing)}.\n" if missing else ""
    tables = [HEAD, *(lines.get(name, "") for name in order), BYTES, *(lines.get(name, "") for name in of_bytes), note]
    PAGE.write_text("".join(tables), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
