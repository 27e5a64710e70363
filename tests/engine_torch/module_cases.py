"""Modules on meshes of four ranks: how far they are from one process, and what another mesh makes of what one has saved.

The first step may differ by a bound that follows from the recipe, and later ones by more: AdamW divides small gradients by themselves.
With an exact scale of a tensor all codes depend on one element, which may itself depend on a code: there another order of summation
in one process gives the bound (``module_orders.py``). Blocks along the tokens of a grouped layer depend on which of them a rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.engine_torch.module_orders import moved_by_orders
from tests.engine_torch.own_modules import (
    DELAYED,
    MESHES,
    MODELS,
    NVFP4,
    OF_TOKENS,
    POWER_OF_TWO,
    WITHOUT_CHANCE,
    Step,
    Trained,
    resumed,
    trained,
)
from tests.engine_torch.ranks import Ranks

FOUR = [kind for kind in MESHES if kind != "one"]
ON_MESHES = (None, "fp8-current", POWER_OF_TWO, DELAYED, "fp8-row", "fp8-block", "mxfp8", WITHOUT_CHANCE, NVFP4)
OF_ONE_ELEMENT = ("fp8-current", WITHOUT_CHANCE, NVFP4)
"""The largest element decides all codes of a tensor, by a scale that is no power of two."""
BY_TOKENS = ("fp8-block", "mxfp8", WITHOUT_CHANCE, NVFP4)
"""Weight gradients have blocks along the tokens."""
FIRST_STEPS, MANY_STEPS = 2, 10
"""Before a save; one more after it. The first ones are compared with one process."""


class ModuleCase(NamedTuple):
    model: str
    recipe: str | None
    kind: str

    def __str__(self) -> str:
        return f"{self.model} {self.recipe or 'high'} {self.kind}"


CASES = [ModuleCase(*one) for one in product(MODELS, ON_MESHES, FOUR)]


class Bound(NamedTuple):
    """``by_largest``: a share of the largest value, and not of the norm. Under a recipe a few codes may be their neighbours, where
    rounding differs before they are quantized."""

    share: float
    by_largest: bool


class Apart(NamedTuple):
    """A difference, its bound, and what it is of."""

    difference: float
    bound: float
    of: str

    @property
    def share(self) -> float:
        return self.difference / self.bound if self.bound else float("inf") if self.difference else 0.0


class Alone:
    """The same in one process, once for each model and recipe: the first steps, and their bounds."""

    def __init__(self, one: Ranks) -> None:
        self._one = one
        self.trained = cache(self._trained)
        self._by_orders = cache(self._moved)

    def _trained(self, model: str, recipe: str | None) -> Trained:
        return self._one.run(trained, "one", model, recipe, "", False, FIRST_STEPS)[0]

    def _moved(self, model: str, recipe: str) -> Sequence[float]:
        return moved_by_orders(self.trained(model, recipe), model, recipe, FIRST_STEPS)

    def bound(self, case: ModuleCase, number: int) -> Bound:
        bound = bound_of(case, number)
        if case.recipe is None or case.recipe not in OF_ONE_ELEMENT:
            return bound
        return bound._replace(share=max(bound.share, self._by_orders(case.model, case.recipe)[number]))


def bound_of(case: ModuleCase, number: int) -> Bound:
    """Of the first step, and of later ones."""
    if case.recipe is None:
        return Bound(1e-5 if number == 0 else 1e-3, by_largest=True)
    depends = case.recipe in OF_ONE_ELEMENT or (case.model == "grouped" and case.recipe in BY_TOKENS)
    # Half of the distance of two codes, of E2M1 or of E4M3; all of it where rounding is stochastic.
    own_error = {NVFP4: 2**-1, WITHOUT_CHANCE: 2**-2}.get(case.recipe or "", 2**-4)
    return Bound(2**-8 if number == 0 and not depends else own_error, by_largest=False)


def apart(found: np.ndarray, needed: np.ndarray, bound: Bound, of: str) -> Apart:
    size_of = _largest if bound.by_largest else np.linalg.norm
    error, size = float(size_of(found - needed)), float(size_of(needed))
    # A layer without tokens has no gradient.
    return Apart(error / size if size else error, bound.share, of)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max())


def steps_apart(found: Step, needed: Step, bound: Bound) -> Iterator[Apart]:
    """The gradients, and their norm."""
    assert found.gradients.keys() == needed.gradients.keys()
    for name, gradient in needed.gradients.items():
        yield apart(found.gradients[name], gradient, bound, name)
    yield Apart(abs(found.norm / needed.norm - 1), bound.share, "the norm of all gradients")


def against_one_process(case: ModuleCase, ranks: Sequence[Trained], alone: Alone) -> list[Apart]:
    """By step, the largest share of its bound. Initial values are equal, and codes of weights in the first step."""
    right = alone.trained(case.model, case.recipe)
    assert bool(right.codes) == (case.recipe is not None)
    for rank in ranks:
        assert rank.codes.keys() == right.codes.keys()
        for name, values in right.first.items():
            np.testing.assert_array_equal(rank.first[name], values, err_msg=name)
        for name, codes in right.codes.items():
            for found, needed in zip(rank.codes[name], codes, strict=True):
                np.testing.assert_array_equal(found, _own_codes(needed, found, rank), err_msg=name)
    every: list[Apart] = []
    for number, needed in enumerate(right.steps):
        bound, of_step = alone.bound(case, number), list[Apart]()
        for rank in ranks:
            output = _own_part(needed.output, rank, case)
            of_step.append(apart(rank.steps[number].output, output, bound, "the output"))
            of_step += steps_apart(rank.steps[number], needed, bound)
        every.append(max(of_step, key=lambda one: one.share))
    return every


def after_loads(case: ModuleCase, onto: Sequence[str], ranks: Sequence[Trained], four: Ranks, folder: Path) -> Apart:
    """The next step after a load, by us and by DCP: the same bits on the same mesh, and on another the largest share of its bound.
    Delayed amaxes are the same on each."""
    found: list[Apart] = []
    num = len(ranks[0].steps) - 1
    for kind in onto:
        pool = four if kind in FOUR else four.first(1)
        bound = bound_of(case, 0)
        for rank, loaded in enumerate(pool.run(resumed, kind, case.model, case.recipe, str(folder), num)):
            needed = ranks[rank].steps[-1]
            for one in filter(None, loaded):
                assert one.scales.keys() == needed.scales.keys()
                for name, kept in needed.scales.items():
                    np.testing.assert_array_equal(one.scales[name], kept, err_msg=name)
                if kind == case.kind:
                    np.testing.assert_array_equal(one.output, needed.output)
                    assert not any(each.difference for each in steps_apart(one, needed, bound)), case
                found += [each._replace(of=f"{each.of} on {kind}") for each in steps_apart(one, needed, bound)]
    return max(found, key=lambda one: one.share)


def _own_part(entire: np.ndarray, rank: Trained, case: ModuleCase) -> np.ndarray:
    """A rank's part of an output: its rows, and of a sharded vocabulary its columns."""
    for index, size in zip(rank.data, [size for axis, size in MESHES[case.kind].items() if axis != "tp"], strict=True):
        entire = np.split(entire, size)[index]
    if case.model in OF_TOKENS or (case.model == "pair" and case.kind == "tp-sp"):
        entire = np.split(entire, rank.tp[1], axis=-1 if case.model in OF_TOKENS else 0)[rank.tp[0]]
    return entire


def _own_codes(entire: np.ndarray, like: np.ndarray, rank: Trained) -> np.ndarray:
    """A rank's part of codes or scales: along the dim that is smaller."""
    for dim, (size, own) in enumerate(zip(entire.shape, like.shape, strict=True)):
        if size != own:
            entire = np.split(entire, rank.tp[1], axis=dim)[rank.tp[0]]
    return entire
