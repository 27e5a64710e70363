"""Trains, saves and loads every case of the modules, and writes docs/sameness-modules.md; fails where a case is beyond a bound.

    python -m tests.engine_torch.whole_modules [--only TEXT] [--missing]

With ``--only``, only cases with the text in their names are trained; with ``--missing``, only those that the page lacks. Other lines stay.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import ROOT
from tests.engine_torch.meeting import in_group
from tests.engine_torch.module_cases import (
    CASES,
    FOUR,
    MANY_STEPS,
    Alone,
    Apart,
    ModuleCase,
    after_loads,
    against_one_process,
)
from tests.engine_torch.own_modules import trained
from tests.engine_torch.ranks import Ranks

PAGE = ROOT / "docs" / "sameness-modules.md"
HEAD = f"""# How much a mesh moves modules

The [modules](modules.md) of three models on meshes of four ranks, compared with the same in one process, under every recipe. `pair` is a
column-parallel and a row-parallel `Linear` with one beside them; `decoder` a vocabulary-parallel `Embedding` with a tied head, attention with a
`LayerNormLinear`, and a gated `LayerNormMLP`; `grouped` two `GroupedLinear` after a `LayerNormLinear`, with a layer that has no tokens. `fp8-current-2` has
scales that are powers of two; `nvfp4-nearest` is `nvfp4` with `disable_rht` and `disable_stochastic_rounding`; `nvfp4` draws the random bits of one process on any mesh. `fsdp` has four ranks,
`hsdp` 2 x 2, `tp` fsdp 2 x tp 2, and `tp-sp` the same with sequence parallelism.

In each case the initial values equal those of one process, and so do the bytes of all weights' codes and scales in the first step. After
{MANY_STEPS} steps of AdamW a save, by `save` and by `torch.distributed.checkpoint`, is loaded onto all four meshes and in one process. On the same mesh
the next step has the same bits, and everywhere the state of delayed scaling has.

Figures are the largest difference of an output or gradient, as a share of its norm (in high precision of its largest value), and in parentheses as a share
of what is allowed: 2^-8 in the first step, and later half of the distance of two codes, 2^-4 (of
`nvfp4-nearest` 2^-2; of `nvfp4`, which rounds stochastically, all of it, 2^-1). Where another order of summation in one process moves it
by more (exact scales of entire tensors), twice that is allowed, and the bound of later steps in the first one too, as for weight gradients whose blocks lie along the tokens that a rank has for a grouped layer.
In high precision it is 1e-5, and 1e-3 later.

`python -m tests.engine_torch.whole_modules` measures again and writes this page, as part of `make test-all`.

| model | recipe | mesh | step 1 | step 2 | step 3 | step {MANY_STEPS + 1} after a load by another mesh | of |
|---|---|---|---:|---:|---:|---:|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--missing", action="store_true")
    given = parser.parse_args()
    lines = kept()
    wanted = [case for case in CASES if given.only in str(case) and not (given.missing and key(case) in lines)]
    start, wrong = time.monotonic(), False
    ranks = Ranks(4, in_group)
    alone = Alone(ranks.first(1))
    try:
        for number, case in enumerate(wanted, 1):
            try:
                found = measured(case, ranks, alone)
            except AssertionError as error:
                print(f"not the same: {case}: {error}", file=sys.stderr, flush=True)
                wrong = True
                continue
            beyond = [one for one in found if one.share > 1]
            wrong = wrong or bool(beyond)
            lines[key(case)] = line(case, found)
            print(f"{time.monotonic() - start:6.0f} s {number:2d}/{len(wanted)} {lines[key(case)]}", end="", flush=True)
            for one in beyond:
                print(f"    beyond its bound: {one}", file=sys.stderr, flush=True)
            keep(lines)
    finally:
        ranks.end()
    return 1 if wrong else 0


def measured(case: ModuleCase, ranks: Ranks, alone: Alone) -> list[Apart]:
    """Of the first steps, and of the one after a load."""
    with tempfile.TemporaryDirectory() as folder:
        found = ranks.run(trained, case.kind, case.model, case.recipe, folder, True, MANY_STEPS)
        first = against_one_process(case, found, alone)
        return [*first, after_loads(case, [*FOUR, "one"], found, ranks, Path(folder))]


def line(case: ModuleCase, found: list[Apart]) -> str:
    cells = [f"{one.difference:.1e} ({one.share:.2f})" for one in found]
    worst = max(found, key=lambda one: one.share)
    return f"| {' | '.join((*key(case), *cells, worst.of))} |\n"


def key(case: ModuleCase) -> tuple[str, ...]:
    return case.model, f"`{case.recipe}`" if case.recipe else "none", case.kind


def kept() -> dict[tuple[str, ...], str]:
    """The lines of the page."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    keys = {key(case) for case in CASES}
    found = {tuple(cell.strip() for cell in one.split("|")[1:4]): one for one in text.splitlines(keepends=True)}
    return {each: one for each, one in found.items() if each in keys}


def keep(lines: dict[tuple[str, ...], str]) -> None:
    order = [key(case) for case in CASES]
    missing = [" ".join(each) for each in order if each not in lines]
    notes = (
        f"\nNot measured yet: {', '.join(missing) if len(missing) < 10 else f'{len(missing)} cases'}.\n"
        if missing
        else ""
    )
    PAGE.write_text(HEAD + "".join(lines[each] for each in order if each in lines) + notes, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
