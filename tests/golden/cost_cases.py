"""The cases of findings about the cost of a layout: communication in a step, settings without effect, and memory."""

from __future__ import annotations

from shardwright.core.resolution.request import Chip
from tests.golden.findings_case import EP, IN_NODES, Case, mine

V5E = Chip(name="v5e", usable_bytes=int(15.75 * 2**30), source="libtpu 0.0.42.1")

ON_COSTS: tuple[Case, ...] = (
    Case(
        name="SW121-fewer-rows-than-devices",
        model="deepseek3-671b",
        layout="ep-as-cp",
        options={"devices": 128, "batch": 64, "mesh_sizes": {"expert": 8}},
        neighbour={"options": {"devices": 1, "batch": 64, "mesh_sizes": {"expert": 1}}},
    ),
    Case(
        name="SW121-a-row-for-each-device",
        model="deepseek3-671b",
        layout="ep-as-cp",
        options={"devices": 128, "batch": 128, "mesh_sizes": {"expert": 8}},
        neighbour={"options": {"devices": 1, "batch": 128, "mesh_sizes": {"expert": 1}}},
    ),
    Case(
        name="SW121-replicas",
        model="llama3-8b",
        layout="hsdp",
        options={"devices": 16},
        neighbour={"options": {"devices": 1, "mesh_sizes": {"data": 1}}},
    ),
    Case(
        name="SW121-stages",
        model="llama3-8b",
        layout="pp",
        options={"devices": 16, "microbatches": 2},
        neighbour={"options": {"devices": 1, "mesh_sizes": {"stage": 1}}},
    ),
    Case(
        name="SW122-entire-rows",
        layout=mine("context: context", "{context: auto}", "move: {attention: ulysses}\n"),
        options={"devices": 8, "load_balanced": True},
        neighbour={"layout": mine("context: context", "{context: auto}", "move: {attention: ring}\n")},
    ),
    Case(
        name="SW122-kept-for-nothing",
        layout=mine("fsdp: {elsewhere: idle, embedding: fsdp, keep_gathered: true}", "{fsdp: auto}"),
        options={"devices": 8},
        neighbour={"layout": mine("fsdp: {elsewhere: fsdp, keep_gathered: true}", "{fsdp: auto}")},
    ),
    Case(
        name="SW122-nothing-recomputed",
        layout=mine("fsdp: {elsewhere: fsdp, keep_gathered: true}", "{fsdp: auto}"),
        options={"devices": 8, "remat": "none"},
        neighbour={"options": {"devices": 8}},
    ),
    Case(
        name="SW122-two-hops-over-one-axis",
        model="mixtral-test",
        layout=mine(EP, rest="move: {moe: two-hops}\n"),
        options={"devices": 8},
        neighbour={"layout": mine(IN_NODES, "{data: 1, fsdp: auto, node: 2, expert: 2}", "move: {moe: two-hops}\n")},
    ),
    Case(
        name="SW312-too-much",
        model="llama3-8b",
        layout="ddp",
        options={"devices": 16, "length": 4096, "chip": V5E},
        neighbour={"options": {"devices": 16, "length": 4096}},
    ),
    Case(
        name="SW312-recomputing-more-would-do",
        model="llama3-8b",
        layout="fsdp",
        options={"devices": 64, "batch": 64, "length": 4096, "remat": "none", "chip": V5E},
        neighbour={"options": {"devices": 64, "batch": 64, "length": 4096, "remat": "full", "chip": V5E}},
    ),
    Case(
        name="SW312-more-devices-with-their-rows",
        model="llama3-8b",
        layout="fsdp",
        options={"devices": 4, "mesh_sizes": {"fsdp": 4}, "batch": 4, "length": 4096, "chip": V5E},
        neighbour={"options": {"devices": 16, "mesh_sizes": {"fsdp": 16}, "batch": 16, "length": 4096, "chip": V5E}},
    ),
    Case(
        name="SW312-microbatches-that-rows-divide-into",
        model="llama3-8b",
        layout="fsdp",
        options={"devices": 16, "batch": 96, "length": 4096, "chip": V5E},
        neighbour={"options": {"devices": 16, "batch": 96, "microbatches": 6, "length": 4096, "chip": V5E}},
    ),
)
