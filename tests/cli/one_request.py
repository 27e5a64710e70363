"""Draws command-line tails, and types each under every verb: the same tail is the same request, or the same refusal.

``python -m tests.cli.one_request --count 200 --seed 1`` prints how many of each.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

from shardwright.cli.main import main as shardwright
from shardwright.cli.reviewing.locked_request import layout_of, options_of
from shardwright.cli.typed.request import TypedRequest, options_text, typed_request
from shardwright.core.resolution.mesh_sizes import Sizes, mesh_text
from shardwright.layouts import load_layout, preset_names
from shardwright.locks.lock_request import LockRequest

MODULES = {
    "plan": "shardwright.cli.plan",
    "lock": "shardwright.cli.reviewing.lock",
    "compile": "shardwright.cli.running.compile",
    "train": "shardwright.cli.running.train",
    "calibrate": "shardwright.cli.running.calibrate",
    "diff": "shardwright.cli.reviewing.sides",
}
MODELS = ("llama3-test", "mixtral-test", "deepseek3-test", "llama3-8b", "mixtral-8x7b", "deepseek3-16b")
CHIPS = ("h100:1x8", "h100:2x8", "h100:4x8", "b200:2x8", "v5p:2x2x4", "v6e:4x8", "cpu:8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What follows a verb. ``layout``: None where none is typed; ``options``: all others."""

    model: str
    layout: str | None
    options: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        layout = () if self.layout is None else ("--layout", self.layout)
        return (self.model, *layout, *self.options)

    @property
    def names_devices(self) -> bool:
        """Whether it says on which devices: `train` takes those that are there where nothing does."""
        mesh = self.options[self.options.index("--mesh") + 1] if "--mesh" in self.options else "auto"
        return "--chips" in self.options or "--devices" in self.options or "auto" not in mesh


class ReachedPlanError(Exception):
    """Ends a command where it would plan its request."""

    def __init__(self, typed: TypedRequest) -> None:
        super().__init__()
        self.typed = typed


def drawn_tail(draw: random.Random) -> Tail:
    """A model with options, each of which is there as often as not; a quarter of them names neither layout, mesh nor rows."""
    layout = draw.choice((None, *preset_names())) if draw.random() < 0.6 else None
    options: list[str] = []
    devices = None
    if draw.random() < 0.7:
        chips = draw.choice(CHIPS)
        options += ["--chips", chips]
        devices = 8 if chips == "cpu:8" else None
    elif draw.random() < 0.5:
        devices = draw.choice((4, 8, 12, 16))
        options += ["--devices", str(devices)]
    if layout is not None and draw.random() < 0.6:
        axes = list(load_layout(layout).mesh)
        sizes: Sizes = {axis: draw.choice((1, 2, 2, 4, 8, "auto")) for axis in axes if draw.random() < 0.7}
        options += ["--mesh", mesh_text(sizes)] if sizes else []
    several = {
        "--batch": ("8", "16", "32", "48"),
        "--length": ("128", "256", "512"),
        "--engine": ("jax", "torch"),
        "--microbatches": ("1", "2"),
        "--loss-chunks": ("2", "8"),
        "--remat": ("full", "dots", "none"),
        "--move": ("moe=weights", "attention=ring", "attention=ring,moe=ring"),
        "--weights-dtype": ("bfloat16", "float32"),
        "--expert-buffer": ("1.0", "1.5"),
        "--precision": ("fp8-current", "mxfp8"),
        "--hops": ("auto",),
    }
    for option, values in several.items():
        if draw.random() < 0.25:
            options += [option, draw.choice(values)]
    if draw.random() < 0.2:
        options += ["--set", "num_layers=2"]
    if draw.random() < 0.1:
        options.append("--load-balance")
    return Tail(model=draw.choice(MODELS), layout=layout, options=tuple(options))


def resolved(verb: str, arguments: Sequence[str]) -> TypedRequest | str:
    """What a command resolves to before anything is planned of it; or how it is refused."""

    def stop(typed: TypedRequest) -> None:
        raise ReachedPlanError(typed)

    said = StringIO()
    module = import_module(MODULES[verb])
    with patch.object(module, "planned", stop), patch.dict("os.environ"), redirect_stderr(said), redirect_stdout(said):
        try:
            shardwright([verb, *arguments])
        except ReachedPlanError as reached:
            return reached.typed
    return said.getvalue()


def held(arguments: Sequence[str]) -> TypedRequest | str:
    """What `check` makes of the request in the lock that a command would write."""
    lock_verb, said = import_module(MODULES["lock"]), StringIO()
    path = Path(arguments[arguments.index("--out") + 1])

    def stop(request: LockRequest, *_: object) -> None:
        again = LockRequest.from_json(json.loads(json.dumps(request.to_json())))
        raise ReachedPlanError(typed_request(again.model, layout_of(again, path), options_of(again, path)))

    faultless = patch.object(lock_verb, "planned", lambda _: SimpleNamespace(faults=()))
    with faultless, patch.object(lock_verb, "lock_of", stop), redirect_stderr(said), redirect_stdout(said):
        try:
            shardwright(["lock", *arguments])
        except ReachedPlanError as reached:
            return reached.typed
    return said.getvalue()


def commands(tail: Tail, planned: TypedRequest | str, folder: Path) -> Mapping[str, Sequence[str]]:
    """The arguments of each other verb with the same tail. `diff` compares a layout with itself: the chosen one where none is typed."""
    of_verbs = {
        "lock": (*tail.words, "--out", str(folder / "a.lock.json")),
        "compile": tail.words,
        "calibrate": (*tail.words, "--out", str(folder / "a.toml")),
    }
    if tail.names_devices:
        of_verbs["train"] = (*tail.words, "--steps", "1", "--out", str(folder / "run"))
    if tail.layout is not None:
        side, chosen = tail.layout, ()
    elif isinstance(planned, TypedRequest):
        sizes = planned.request.mesh_sizes
        side = f"{planned.request.layout.name}:{mesh_text(sizes)}" if sizes else planned.request.layout.name
        step = {option: value for option, value in planned.for_chips.items() if option not in ("--layout", "--mesh")}
        chosen = tuple(options_text(step).split())
    else:
        return of_verbs
    return {**of_verbs, "diff": (side, side, "--model", tail.model, *tail.options, *chosen)}


def differing(tail: Tail) -> Iterator[str]:
    """Each verb under which a tail is another request than under `plan`, or is refused in another way."""
    first = resolved("plan", tail.words)
    with TemporaryDirectory() as folder:
        for verb, arguments in commands(tail, first, Path(folder)).items():
            others = {verb: resolved(verb, arguments), **({"check": held(arguments)} if verb == "lock" else {})}
            for name, other in others.items():
                requests = [one.request if isinstance(one, TypedRequest) else one for one in (first, other)]
                if requests[0] != requests[1]:
                    yield f"{verb} {' '.join(arguments)}\n  plan: {requests[0]}\n  {name}: {requests[1]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    kinds: Counter[str] = Counter()
    for number in range(asked.count):
        tail = drawn_tail(random.Random(f"{asked.seed}.{number}"))
        faults = list(differing(tail))
        reached = isinstance(resolved("plan", tail.words), TypedRequest)
        kinds["differ" if faults else "are the same request" if reached else "are refused alike"] += 1
        for fault in faults:
            print(fault)
    print(", ".join(f"{number} {kind}" for kind, number in kinds.items()))
    sys.exit(1 if kinds["differ"] else 0)


if __name__ == "__main__":
    main()
