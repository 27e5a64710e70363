"""Saves at some places, and loads at others of what was saved there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint import RunPoint, open_newest, verify
from tests.engine_torch.ranks import Ranks
from tests.pairs import on_jax, on_torch
from tests.pairs.cases import Place, as_bits, plan_of, values_of

STEP = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint. ``num_boxes``: over all tensors."""

    out: Path
    num_boxes: int


def save_at(place: Place, out: Path, ranks: Ranks, *, asynchronous: bool) -> Saved:
    """Save the state at a place. Every element of the checkpoint is read, and compared with that of the state."""
    plan = plan_of(place)
    point = RunPoint(
        step=STEP,
        seed=0,
        data_position=0,
        model=place.model,
        layout_name=place.layout,
        layout_text="",
        mesh=dict(plan.mesh.shape),
    )
    if place.engine == "jax":
        on_jax.save(plan, point, out, asynchronous=asynchronous)
    else:
        ranks.first(plan.mesh.num_devices).run(on_torch.save, plan, point, out, asynchronous)
    assert verify(out)["ok"]
    checkpoint = open_newest(out)
    for name, info in checkpoint.tensors.items():
        needed = values_of(name, tuple(info.shape), info.dtype)
        assert (as_bits(checkpoint.read_box(name)) == as_bits(needed)).all(), f"{place}: {name}"
    return Saved(out=out, num_boxes=sum(len(checkpoint.boxes(name)) for name in checkpoint.tensors))


def load_at(place: Place, folders: Sequence[Path], ranks: Ranks) -> list[list[str]]:
    """For each folder, what a load at the place does not give bit for bit."""
    plan = plan_of(place)
    if place.engine == "jax":
        return on_jax.loaded(plan, list(folders), STEP)
    by_rank = ranks.first(plan.mesh.num_devices).run(on_torch.loaded, plan, list(folders), STEP)
    return [sorted({name for names in of_folder for name in names}) for of_folder in zip(*by_rank, strict=True)]


def exchange(
    saving: Sequence[Place], loading: Iterable[Place], folder: Path, ranks: Ranks
) -> tuple[Mapping[Place, Saved], Mapping[tuple[Place, Place], list[str]]]:
    """What each place saved, and of each pair of a saving and a loading one what differs. Every second save is asynchronous."""
    saved = {
        place: save_at(place, folder / str(number), ranks, asynchronous=number % 2 == 1)
        for number, place in enumerate(saving)
    }
    folders = [one.out for one in saved.values()]
    pairs: dict[tuple[Place, Place], list[str]] = {}
    for place in loading:
        for before, wrong in zip(saved, load_at(place, folders, ranks), strict=True):
            pairs[before, place] = wrong
    return saved, pairs
