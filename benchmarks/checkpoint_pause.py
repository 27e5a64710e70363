"""How long asynchronous saves keep programs on JAX and on PyTorch: the call of a save, and all steps with a save against steps without.

python -m benchmarks.checkpoint_pause [--quick] [--only TEXT]
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright import engine_jax, engine_torch
from shardwright.runs.own_program.background import BackgroundSaves

ROWS, EMBED = 128, 1024
"""Of a batch, and of each weight."""
NOTES = (
    "A program computes products of a batch with weights of 1024 rows, their gradients, and an update of Adam; weights and moments are the "
    "state. It computes on all cores of the machine, on which the thread that hashes and writes runs too.",
    "The call: how long Saver.save keeps the program, after the first save. Steps: the time of the call and of so many steps that the save ends "
    "during them, less that of as many steps without a save; it has whatever the copy and the writing take from the steps. Both are "
    "over a save of the same state that is not asynchronous, in the same round; medians are shown. Blocks with and without a save alternate.",
    "With `overlap=True` the state is copied while the next step computes its gradients. With `copy=False` nothing is copied, and the "
    "program donates nothing.",
)


class Program(Protocol):
    """A program with a state. ``saver``: what it saves with in the background."""

    def step(self) -> None: ...
    def save(self, folder: Path) -> None: ...
    def saver(self, folder: Path) -> BackgroundSaves: ...
    def save_with(self, saver: Any, number: int) -> None: ...


class OnTorch:
    def __init__(self, num_bytes: int, *, overlap: bool) -> None:
        torch.manual_seed(0)
        self._overlap = overlap
        self._module = nn.ParameterList(nn.Parameter(torch.randn(EMBED, columns)) for columns in widths(num_bytes))
        self._optimizer = torch.optim.AdamW(self._module.parameters())
        self._rows = torch.randn(ROWS, EMBED)

    def step(self) -> None:
        loss = sum(((self._rows @ weight).square().mean() for weight in self._module), torch.zeros(()))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        engine_torch.save(folder, self._module, self._optimizer, step=1)

    def saver(self, folder: Path) -> BackgroundSaves:
        return engine_torch.Saver(folder, keep=1, overlap=self._overlap)

    def save_with(self, saver: engine_torch.Saver, number: int) -> None:
        saver.save(self._module, self._optimizer, step=number)


class OnJax:
    def __init__(self, num_bytes: int, *, donated: bool) -> None:
        rng = np.random.default_rng(0)
        weights = [jnp.asarray(rng.standard_normal((EMBED, columns), np.float32)) for columns in widths(num_bytes)]
        self._donated = donated
        self._state = {"weights": weights, **{name: [jnp.zeros_like(one) for one in weights] for name in ("m", "v")}}
        self._rows = jnp.asarray(rng.standard_normal((ROWS, EMBED), np.float32))
        self._step = jax.jit(_updated, donate_argnums=0 if donated else ())

    def step(self) -> None:
        self._state = jax.block_until_ready(self._step(self._state, self._rows))

    def save(self, folder: Path) -> None:
        engine_jax.save(folder, self._state, step=1)

    def saver(self, folder: Path) -> BackgroundSaves:
        return engine_jax.Saver(folder, keep=1, copy=self._donated)

    def save_with(self, saver: engine_jax.Saver, number: int) -> None:
        saver.save(self._state, step=number)


State = dict[str, list[jax.Array]]


def _updated(state: State, rows: jax.Array) -> State:
    """An update of Adam."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        return sum((jnp.mean(jnp.square(rows @ weight)) for weight in weights), jnp.zeros(()))

    gradients = jax.grad(loss)(state["weights"])
    m = [0.9 * old + 0.1 * new for old, new in zip(state["m"], gradients, strict=True)]
    v = [0.95 * old + 0.05 * new * new for old, new in zip(state["v"], gradients, strict=True)]
    weights = [
        weight - 1e-3 * first / (jnp.sqrt(second) + 1e-8)
        for weight, first, second in zip(state["weights"], m, v, strict=True)
    ]
    return {"weights": weights, "m": m, "v": v}


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "JAX": partial(OnJax, donated=True),
    "JAX, copy=False": partial(OnJax, donated=False),
    "PyTorch": partial(OnTorch, overlap=False),
    "PyTorch, overlap=True": partial(OnTorch, overlap=True),
}


def widths(num_bytes: int) -> list[int]:
    """The columns of the weights of a state of so many bytes, of which a third are weights, of 64 MiB or less each."""
    columns = num_bytes // 3 // 4 // EMBED
    return [columns // -(-columns // 16384)] * -(-columns // 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of one round."""

    save_s: float
    call_s: float
    with_s: float
    without_s: float

    @property
    def call(self) -> float:
        return self.call_s / self.save_s

    @property
    def steps(self) -> float:
        return (self.with_s - self.without_s) / self.save_s


def rounds_of(program: Program, folder: Path, count: int) -> tuple[int, list[Round]]:
    """How many steps a block has, and the rounds. The first one warms up, and gets the memory of the copies."""
    program.step()
    step_s, found = timed(program.step), list[Round]()
    save_s = timed(lambda: program.save(folder / "warm"))
    steps = 2 + math.ceil(1.5 * save_s / step_s)

    def block() -> None:
        for _ in range(steps):
            program.step()

    with program.saver(folder / "background") as saver:
        for number in range(1, count + 2):
            save_s = timed(lambda at=folder / f"once-{number}": program.save(at))
            shutil.rmtree(folder / f"once-{number}")
            without_s = timed(block) if number % 2 else 0.0
            call_s = timed(lambda number=number: program.save_with(saver, number))
            with_s = call_s + timed(block)
            saver.wait()
            without_s = without_s or timed(block)
            if number > 1:
                found.append(Round(save_s=save_s, call_s=call_s, with_s=with_s, without_s=without_s))
    return steps, found


def timed(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def main() -> None:
    """Time all programs."""
    options = begin(__doc__, devices=1)
    num_bytes = (1 << 28) if options.quick else (1 << 30)
    rows, numbers = [], []
    for name, program in PROGRAMS.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory(dir=".") as folder:
            steps, found = rounds_of(program(num_bytes), Path(folder), options.blocks(5))
        shown = {what: median(getattr(one, what) for one in found) for what in ("save_s", "call_s", "call", "steps")}
        rows.append(
            [
                name,
                f"{shown['save_s']:.2f} s",
                f"{shown['call_s']:.3f} s",
                f"{shown['call']:.3f}",
                str(steps),
                f"{median(one.without_s for one in found) / steps:.2f} s",
                f"{shown['steps']:.2f}",
            ]
        )
        numbers.append(
            {
                "program": name,
                "steps": steps,
                "rounds": [[one.save_s, one.call_s, one.with_s, one.without_s] for one in found],
            }
        )
        print(rows[-1], flush=True)
    keep(
        Found(
            name="checkpoint_pause",
            title=f"What an asynchronous save of {num_bytes >> 20:,} MiB takes from a program",
            columns=["program", "a save", "the call", "of a save", "steps", "each", "all steps longer, of a save"],
            rows=rows,
            headline="; ".join(f"{row[0]}: call {row[3]}, steps {row[-1]}" for row in rows),
            notes=NOTES,
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()
