"""The engines by name. Only here does the core name one; everything else reads its properties (tests/laws/engine_names.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from shardwright.core.engines.properties import EngineProperties

Engine = Literal["jax", "torch"]

DEFAULT_ENGINE: Engine = "jax"

ENGINES: Mapping[Engine, EngineProperties] = {
    "jax": EngineProperties(
        title="the JAX engine",
        framework="JAX",
        accelerators=frozenset({"CPU", "GPU", "TPU"}),
        schedules=("circular",),
        product_library="xla",
        lacks=frozenset(
            {
                "codes at rest in stages",
                "dtypes of gradients in stages",
                "gradients scattered in stages",
                "kept weights of own programs",
            }
        ),
        trains_own_programs=False,
        one_program=True,
        compiled=True,
        joins_equal_results=True,
        repeats_in_order=False,
        static_rows=True,
        merges_dims=False,
        outputs_first=False,
        divides_by_heads=frozenset(),
        stacks_layers=True,
        uneven_shards=False,
        updates_any_dim=False,
        updates_in_place=False,
        gathers_together=False,
        gathers_once=False,
        gathers_frozen=True,
        gathers_by_schedule=False,
        reduces_over_gathered=False,
        reduces_replicas_early=False,
        sends_scales_with_codes=False,
        frees_eagerly=False,
        returns_copies_beside=True,
        keeps_ring_keys=True,
        scores_at_once=True,
        masks_attention=False,
    ),
    "torch": EngineProperties(
        title="the PyTorch engine",
        framework="PyTorch",
        accelerators=frozenset({"CPU", "GPU"}),
        schedules=("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"),
        product_library="aten",
        lacks=frozenset(
            {
                "codes at rest on all devices",
                "gradients wider than gathered weights",
                "kept weights in stages",
                "own programs in stages",
                "parts of policies in stages",
                "weights stored on several dims",
            }
        ),
        trains_own_programs=True,
        one_program=False,
        compiled=False,
        joins_equal_results=False,
        repeats_in_order=True,
        static_rows=False,
        merges_dims=True,
        outputs_first=True,
        # Of ``nn.MultiheadAttention``: its rows are those of q, k and v, one after the other.
        divides_by_heads=frozenset({"in_proj_weight"}),
        stacks_layers=False,
        uneven_shards=True,
        updates_any_dim=True,
        updates_in_place=True,
        gathers_together=True,
        gathers_once=True,
        gathers_frozen=False,
        gathers_by_schedule=True,
        reduces_over_gathered=True,
        reduces_replicas_early=True,
        sends_scales_with_codes=True,
        frees_eagerly=True,
        returns_copies_beside=False,
        keeps_ring_keys=False,
        scores_at_once=False,
        masks_attention=True,
    ),
}


def engine_named(name: str | None) -> Engine:
    """The engine that a command line names; the default where it names none.

    >>> engine_named("torch"), engine_named(None)
    ('torch', 'jax')
    """
    named: Mapping[str, Engine] = {engine: engine for engine in ENGINES}
    return DEFAULT_ENGINE if name is None else named[name]
