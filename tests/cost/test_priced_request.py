"""A request has one price: alone, as the search asks for it, and with the findings of its plan; and after any other requests."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import _lru_cache_wrapper, partial

import pytest

from shardwright import FindingsError, load_layout, make_plan
from shardwright.core.findings.errors import InputError
from shardwright.core.layout.layout import Layout
from shardwright.core.planning import resolve
from shardwright.core.resolution.request import Request
from shardwright.cost import price, read_machine, with_unit_costs
from shardwright.cost.advice import priced_request
from shardwright.cost.hardware.machine import Machine
from shardwright.layouts import load_recipe
from shardwright.models import build

MODELS = ("llama3-8b", "mixtral-8x7b", "deepseek3-test")
LAYOUTS = ("fsdp-tp", "hsdp", "ep", "ep-as-cp", "cp", "pp", "pp", "pp")
CHIPS = ("h100:4x8", "b200:2x8", "v5p:4x4x2", "v6e:4x8")
REMATS = ("full", "dots", "none", "full,keep=attention.output")
RECIPES = (None, None, None, "mxfp8", "fp8-current")


def drawn_stream(draw: random.Random, length: int) -> Iterator[tuple[Request, Machine]]:
    """Requests with one layout on a few meshes, which differ in all that a search changes."""
    table, machine, layout = build(draw.choice(MODELS)), read_machine(draw.choice(CHIPS)), drawn_layout(draw)
    engine = draw.choice(("jax", "torch"))
    meshes: list[dict[str, int]] = [{}, *(drawn_sizes(draw, layout, machine.num_devices) for _ in range(2))]
    for _ in range(length):
        recipe = draw.choice(RECIPES)
        yield (
            Request(
                layout=layout,
                table=table,
                devices=machine.num_devices,
                mesh_sizes=draw.choice(meshes),
                engine=engine,
                batch=draw.choice((128, 256)),
                length=4096,
                dtype="bfloat16",
                chip=machine.chip,
                microbatches=draw.choice((2, 4, 8)),
                remat=draw.choice(REMATS),
                loss_chunks=draw.choice((1, 4)),
                weights_dtype=draw.choice(("float32", "bfloat16")),
                moments_dtype=draw.choice(("float32", "bfloat16")),
                gradients_dtype=draw.choice((None, "float32")),
                expert_buffer=draw.choice((None, 1.25)),
                precision=None if recipe is None else load_recipe(recipe),
            ),
            machine,
        )


def drawn_layout(draw: random.Random) -> Layout:
    layout = load_layout(draw.choice(LAYOUTS))
    return replace(layout, move_moe="auto") if draw.random() < 0.3 else layout


def drawn_sizes(draw: random.Random, layout: Layout, devices: int) -> dict[str, int]:
    """Sizes of all axes of the layout that multiply to a power of two."""
    sizes = dict.fromkeys(layout.entries, 1)
    for _ in range(devices.bit_length() - 1):
        sizes[draw.choice([*sizes])] *= 2
    return sizes


def priced(request: Request, machine: Machine) -> object:
    """The price and what is sent, or why there is none."""
    try:
        plan = resolve(request)
        return priced_request(request, machine), plan.tensors, plan.collectives
    except (FindingsError, InputError) as error:
        return str(error)


def forget() -> None:
    """Forgets all that was derived before."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(("shardwright.core.", "shardwright.cost.")):
            for value in vars(module).values():
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()


@pytest.mark.parametrize("seed", range(6))
def test_a_request_takes_the_seconds_of_its_plan(seed: int) -> None:
    draw = random.Random(seed)
    for request, machine in drawn_stream(draw, 2):
        request = replace(request, mesh_sizes={})
        alone = priced_request(request, machine)
        plan = price(make_plan(request, partial(with_unit_costs, machine=machine)), machine)
        assert alone.seconds == (None if plan.step is None else plan.step.seconds)
        assert alone.bytes_per_device == plan.memory.total_bytes_per_device


def test_the_price_does_not_depend_on_requests_before() -> None:
    """What is looked up has all that it depends on in its key."""
    _holds_for(seeds=range(20), length=4)


@pytest.mark.matrix
def test_the_price_does_not_depend_on_many_requests_before() -> None:
    _holds_for(seeds=range(100, 350), length=8)


def _holds_for(seeds: range, length: int) -> None:
    for seed in seeds:
        stream = [*drawn_stream(random.Random(seed), length)]
        after_others = [priced(*one) for one in stream]
        for one, warm in zip(stream, after_others, strict=True):
            forget()
            assert priced(*one) == warm, (seed, one[0].layout.name)
