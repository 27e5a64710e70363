"""Every place loads what every other one saved, on both engines; writes docs/pairs.md, and fails where a bit differs.

    python -m tests.pairs.whole [--only MODEL]

With ``--only``, nothing is written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from tests.conftest import ROOT
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.pairs.cases import ENGINES, MODELS, Place, places, plan_of, uneven_weights
from tests.pairs.exchanging import Saved, exchange

PAGE = ROOT / "docs" / "pairs.md"
LIMIT_S = 600.0
HEAD = """# What every layout loads

A checkpoint that one layout saved is loaded under every other one, by both engines. `make test-all` saves the state of each of
these models under each of these layouts, on simulated devices of JAX and on ranks of PyTorch, loads each checkpoint at each of
these places, and writes this page again; `make test` does so for a random twentieth of the pairs.

- The state is weights, both moments of each, and buffers; of `mixtral-test` also factors and histories of delayed amaxes. Its elements
  are random bits, with NaNs among them. Dims are odd, so that many axes do not divide the dims that they shard.
- Each second save is asynchronous. Each checkpoint is verified, and all of its elements are compared.
- After a load on JAX, each device must hold the bits that a NumPy array has at the indices that JAX gives the device. After a load
  on PyTorch, `DTensor.full_tensor` must gather what a model on one device holds. Padding must be zero.
- *boxes*: stored in the checkpoint of the layout. *uneven*: the number of weights of which devices have shards of several sizes, or
  none. *loaded*: how many of the checkpoints of the model, those of both engines, were loaded there bit for bit.
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    start, failed, lines = time.monotonic(), [], [HEAD]
    ranks = Ranks(4, in_group, LIMIT_S)
    try:
        for model in MODELS:
            if options.only not in model:
                continue
            with tempfile.TemporaryDirectory() as folder:
                saved, pairs = exchange(places(model), places(model), Path(folder), ranks)
            failed += [f"{before} -> {after}: {', '.join(wrong)}" for (before, after), wrong in pairs.items() if wrong]
            lines += table(model, saved, pairs)
            print(f"{time.monotonic() - start:6.0f} s {model}: {len(pairs):,} pairs", flush=True)
    finally:
        ranks.end()
    for one in failed:
        print(f"differs: {one}", file=sys.stderr)
    if not options.only and not failed:
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if failed else 0


def table(model: str, saved: Mapping[Place, Saved], pairs: Mapping[tuple[Place, Place], list[str]]) -> Iterator[str]:
    """The section of a model: a row for each of its layouts."""
    known = set(places(model))
    yield f"## {model}\n"
    yield f"`--set {MODELS[model].settings.replace(',', ' ')}`, weights in {MODELS[model].weights_dtype}: {len(pairs):,} pairs.\n"
    yield "| layout | JAX | boxes | uneven | loaded | PyTorch | boxes | uneven | loaded |"
    yield "|---|---|---:|---:|---:|---|---:|---:|---:|"
    for layout, *meshes in MODELS[model].layouts:
        cells: list[str] = []
        for engine, mesh in zip(ENGINES, meshes, strict=True):
            if mesh is None:
                cells.append("- | | | ")
                continue
            place = Place(model=model, engine=engine, layout=layout, mesh=mesh)
            right = sum(not wrong for (_, after), wrong in pairs.items() if after == place)
            uneven = uneven_weights(plan_of(place))
            cells.append(f"{mesh} | {saved[place].num_boxes:,} | {uneven} | {right} of {len(known)}")
        yield f"| {layout} | {' | '.join(cells)} |"
    yield ""


if __name__ == "__main__":
    sys.exit(main())
