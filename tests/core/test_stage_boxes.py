"""The boxes of devices in stages: every layer of every tensor once, on the devices of the stage that has it."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from random import Random

import numpy as np
import pytest

import shardwright as sw
from shardwright.core.boxes.box import Box
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import owned_at_rest, saved_boxes
from shardwright.core.schedules.actions import Placement
from shardwright.core.stages.assignment import Stage
from shardwright.core.stages.padded import padded_stack
from shardwright.files import parse_yaml
from tests.core.test_owned_at_rest import counts

SCHEDULES = {"loop": "gpipe", "rounds": "looped-bfs", "v": "zbv"}
"""A schedule with one chunk of a rank, with several, and in a V; all with any number of microbatches."""

ENGINES = ("torch", "jax")

PLACEMENTS: tuple[Placement, ...] = ("loop", "v")


def layout_of(axes: tuple[str, ...], virtual: int, schedule: str) -> Layout:
    """Stages, fsdp inside and replicas, with the axes in the order given."""
    sizes = ", ".join(f"{axis}: 1" for axis in axes)
    text = (
        f"name: staged\nmesh: {{{sizes}}}\n"
        f"roles:\n  stage: {{elsewhere: stage, virtual: {virtual}, schedule: {schedule}}}\n  data: data\n  fsdp: fsdp\n"
    )
    return read_layout(parse_yaml(text, "staged.yaml"))


def staged(
    table: ModelTable, letters: list[str], ranks: int, schedule: str, engine: str, axes: tuple[str, ...]
) -> Plan:
    sizes = {"stage": ranks, "data": 2, "fsdp": 2}
    return sw.make_plan(
        sw.Request(
            layout=layout_of(axes, len(letters) // ranks, schedule),
            table=table,
            batch=24,
            length=64,
            mesh_sizes={axis: sizes[axis] for axis in axes},
            microbatches=ranks,
            engine=engine,  # pyright: ignore[reportArgumentType]
            stages="|".join(letters),
        )
    )


def random_letters(draw: Random, layers: int, stages: int) -> list[str]:
    """An assignment, uneven, in which a stage may have an end alone."""
    units = "E" + "t" * layers + "L"
    ends = [0, *sorted(draw.sample(range(1, len(units)), stages - 1)), len(units)]
    return [units[first:end] for first, end in pairwise(ends)]


def stage_of(letters: list[str], layer: int) -> int:
    return next(n for n in range(len(letters)) if "".join(letters[: n + 1]).count("t") > layer)


def rank_of(stage: int, ranks: int, placed: str) -> int:
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    return there_and_back[stage] if placed == "v" else stage % ranks


def cases() -> list[tuple[str, str, int, int, str, tuple[str, ...]]]:
    """Model, engine, ranks, chunks, placement, order of the axes."""
    return [
        ("deepseek3-test", "torch", 3, 1, "loop", ("stage", "data", "fsdp")),
        ("deepseek3-test", "torch", 2, 2, "v", ("data", "stage", "fsdp")),
        ("llama3-test", "torch", 2, 2, "rounds", ("fsdp", "data", "stage")),
        ("deepseek3-test", "jax", 3, 1, "loop", ("data", "fsdp", "stage")),
        ("llama3-test", "jax", 2, 2, "rounds", ("stage", "data", "fsdp")),
    ]


@pytest.mark.parametrize(("model", "engine", "ranks", "chunks", "placed", "axes"), cases())
def test_each_layer_is_on_the_devices_of_its_stage(
    model: str, engine: str, ranks: int, chunks: int, placed: str, axes: tuple[str, ...]
) -> None:
    """Against maps of indices made by hand, over random assignments. Inside a stage the boxes are those of a layer of the model
    without stages."""
    draw = Random(f"{model} {engine} {placed}")
    table = sw.model_table(model)
    schedule = SCHEDULES[placed] if engine == "torch" else "circular"
    alone = sw.make_plan(
        sw.Request(
            layout=sw.load_layout("hsdp"),
            table=table,
            batch=24,
            length=64,
            mesh_sizes={axis: {"data": 2, "fsdp": 2}[axis] for axis in ("data", "fsdp")},
            engine=engine,  # pyright: ignore[reportArgumentType]
        )
    )
    within = dict(owned_at_rest(alone))
    for _ in range(3):
        letters = random_letters(draw, table.num_layers, ranks * chunks)
        plan = staged(table, letters, ranks, schedule, engine, axes)
        assert plan.pipeline is not None, plan.errors
        assert plan.mesh.names == axes
        held, sizes = dict(owned_at_rest(plan)), plan.mesh.shape
        saved = {weight.name: [] for weight in table.weights}
        for device, place in enumerate(np.ndindex(*(sizes[axis] for axis in axes))):
            here = dict(zip(axes, place, strict=True))
            beside = here["data"] * 2 + here["fsdp"]
            boxes: dict[str, list[Box]] = {weight.name: [] for weight in table.weights}
            for one in saved_boxes(plan, device):
                boxes[one.weight].append(one.box)
                saved[one.weight] += [one.box] * one.saves
            for weight in table.weights:
                shape = (weight.num, *weight.shape) if weight.stack else weight.shape
                expected = counts(shape, list(within[weight.name][beside]))
                if weight.stack:
                    stages = [stage_of(letters, weight.first_layer + layer) for layer in range(weight.num)]
                    mine = [rank_of(stage, ranks, placed) == here["stage"] for stage in stages]
                    expected[np.logical_not(mine)] = 0
                elif engine == "torch":
                    ends = {"embedding": 0, "logits": len(letters) - 1, "residual": len(letters) - 1}
                    stages = [ends[use] for use in (weight.component, *weight.uses)]
                    if all(rank_of(stage, ranks, placed) != here["stage"] for stage in stages):
                        expected[...] = 0
                assert np.array_equal(counts(shape, boxes[weight.name]).clip(max=1), expected), (
                    weight.name,
                    device,
                    letters,
                )
                assert np.array_equal(counts(shape, list(held[weight.name][device])).clip(max=1), expected)
        for weight in table.weights:
            shape = (weight.num, *weight.shape) if weight.stack else weight.shape
            assert (counts(shape, saved[weight.name]) == 1).all(), (weight.name, letters)


def test_a_tied_embedding_is_saved_by_its_first_stage() -> None:
    """Under PyTorch the stages of both its uses have all of it; under JAX all stages do."""
    table = sw.model_table("llama3-test", {"tied": "true"})
    [tied] = [weight for weight in table.weights if weight.uses]
    letters = ["Et" + "t" * (table.num_layers - 2), "tL"]
    for engine in ENGINES:
        plan = staged(
            table, letters, 2, "gpipe" if engine == "torch" else "circular", engine, ("stage", "data", "fsdp")
        )
        owned = [[one for one in saved_boxes(plan, device) if one.weight == tied.name] for device in range(8)]
        assert [sum(one.box.size for one in found) * 2 for found in owned] == pytest.approx([prod(tied.shape)] * 8)
        assert [any(one.saves for one in found) for found in owned] == [True] * 2 + [False] * 6


def test_rows_of_a_padded_array_are_the_layers_of_their_stages() -> None:
    """Every box of the array, against an array filled row by row."""
    draw = Random(5)
    table = sw.model_table("deepseek3-test")
    for _ in range(60):
        ranks, chunks = draw.randint(1, 4), draw.randint(1, 2)
        placed: Placement = draw.choice(PLACEMENTS) if chunks == 2 else "loop"
        letters = random_letters(draw, table.num_layers, min(ranks * chunks, table.num_layers + 2))
        if len(letters) != ranks * chunks:
            continue
        stages, first = [], 0
        for own in letters:
            stages.append(Stage(layers=range(first, first + own.count("t"))))
            first += own.count("t")
        for stack in {weight.stack for weight in table.weights if weight.stack}:
            row = next(weight for weight in table.weights if weight.stack == stack)
            saved = np.arange(row.num * 2).reshape(row.num, 2)
            rows: list[list[np.ndarray]] = [[] for _ in letters]
            for layer in range(row.num):
                rows[stage_of(letters, row.first_layer + layer)].append(saved[layer])
            most = max(map(len, rows))
            padding = [np.full(2, -1)]
            order = [s for rank in range(ranks) for s in range(len(letters)) if rank_of(s, ranks, placed) == rank]
            array = np.array([one for stage in order for one in rows[stage] + padding * (most - len(rows[stage]))])
            found = padded_stack(table, stack, stages, ranks, placed)
            assert (found.rows, found.most) == (len(array), most)
            assert [-1 if layer is None else saved[layer][0] for layer in found.layers] == [one[0] for one in array]
            for start in range(len(array)):
                for stop in range(start + 1, len(array) + 1):
                    parts = list(found.saved(Box((start, 0), (stop, 1))))
                    for part, box in parts:
                        assert np.array_equal(array[part.slices], saved[box.slices])
                    assert sum(part.size for part, _ in parts) == (array[start:stop, 0] >= 0).sum()
