"""Memory of a step in stages, compiled for chips that need not be there: ours beside the scheme of MaxText by hand.

python -m benchmarks.stages_memory [--chips v5p:2x2x4] [--model llama3-8b]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import OPTIONS
from benchmarks.handwritten import circular
from benchmarks.handwritten import training as by_hand
from benchmarks.handwritten.sharding import Layout, at_rest
from benchmarks.results import Found, keep, load
from shardwright.cli.running.compile import without_hardware
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.cost import Machine
from shardwright.engine_jax.compile.compiling import Stats, build, lower_step
from shardwright.engine_jax.compile.target import target_mesh

GIB = 2**30
NOTES = (
    "By hand: one layer a stage, so that microbatches go round as often as a stage has layers; each iteration saves its input.",
    "The loss by hand is that of all rows at one time, or of one row of each device after the other; ours that of one microbatch, or of its "
    "tokens in as many chunks as there are microbatches.",
    "Temporaries are what the compiler allocates for a step besides its arguments.",
)


def main() -> None:
    """Compile all programs of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="v5p:2x2x4")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--set", default=None)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--fsdp", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=8)
    given, before = parser.parse_args(), load()
    without_hardware(os.environ, jax_is_loaded=False)
    jax.config.update("jax_platforms", "cpu")
    plan, machine = plan_of(given)
    in_chunks, _ = plan_of(given, loss_chunks=given.microbatches)
    # Of each part a device has one row.
    parts = given.rows // machine.num_devices
    programs: Mapping[str, Callable[[], Any]] = {
        "ours": partial(lower_step, plan, machine),
        "ours, the loss in chunks": partial(lower_step, in_chunks, machine),
        "by hand": partial(lowered_by_hand, plan, machine, 1),
        "by hand, the loss in parts": partial(lowered_by_hand, plan, machine, parts),
    }
    rows, numbers = [], []
    for name, lower in programs.items():
        found = build(lower(), machine)
        rows.append([name, *_columns(found.stats), f"{found.compile_seconds:.0f} s"])
        numbers.append({"program": name, **found.stats._asdict()})
        print("  ".join(rows[-1]), flush=True)
    ours, ours_in_chunks, by_hand, in_parts = (one["temporaries_bytes"] for one in numbers)
    keep(
        Found(
            name="stages_memory",
            title=f"{given.model} on {given.chips}: stages {given.stages} x fsdp {given.fsdp}, {given.rows} rows of {given.length} in "
            f"{given.microbatches} microbatches",
            columns=["program", "arguments", "temporaries", "peak", "compiled in"],
            rows=rows,
            headline=f"temporaries {ours / by_hand:.2f} of those by hand, {ours_in_chunks / in_parts:.2f} with the loss in parts",
            notes=NOTES,
            numbers=numbers,
        ),
        before,
    )


def plan_of(given: argparse.Namespace, loss_chunks: int = 1) -> tuple[Plan, Machine]:
    """Our plan, and its machine. Ends the command if it has errors."""
    options = PlanOptions(
        mesh=f"stage={given.stages},fsdp={given.fsdp}",
        chips=given.chips,
        batch=given.rows,
        length=given.length,
        microbatches=given.microbatches,
        dtype="bfloat16",
        loss_chunks=loss_chunks,
        set=((given.set,),) if given.set else (),
    )
    typed = typed_request(given.model, "pp", options)
    plan = make_plan(typed.request)
    if plan.errors or typed.machine is None:
        raise SystemExit(f"{plan.errors}")
    return plan, typed.machine


def lowered_by_hand(plan: Plan, machine: Machine, loss_parts: int) -> jax.stages.Lowered:
    """The step by hand, lowered for a machine."""
    request = plan.request
    mesh = target_mesh(plan.mesh, machine)
    layout = Layout(mesh, batch=("fsdp",), rest=("fsdp",))
    weights = weights_by_hand(request.table, layout)
    numbers = numbers_of(request.table, request.dtype, mesh.shape["stage"], request.microbatches, loss_parts)
    decayed = frozenset(weight.name for weight in request.table.weights if len(weight.shape) > 1)
    optimizer = by_hand.adamw(OPTIONS, decayed)
    places = by_hand.state_places(optimizer, weights, {}, layout)
    shapes = jax.eval_shape(optimizer.init, weights)
    kept = jax.tree.map(
        lambda one, place: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place), shapes, places.optimizer
    )
    attend = splash if mesh.devices.flat[0].platform == "tpu" else plain
    step = by_hand.train_step(
        partial(circular.loss, numbers=numbers, layout=layout, attend=attend), optimizer, places, layout
    )
    rows = layout.sharding(layout.batch, ())
    shape = (request.batch, request.length)
    batch = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
        for name in ("tokens", "targets", "positions", "segments")
    }
    batch["valid"] = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=rows)
    return step.lower(by_hand.TrainState(weights, kept, {}), batch)


def weights_by_hand(table: ModelTable, layout: Layout) -> dict[str, Any]:
    """The weights with their shardings: layers over the stages, and dims as without stages."""
    found, specs = {}, at_rest(layout)
    for weight in table.weights:
        stacked = weight.stack is not None
        short = weight.name.split("layers.", 1)[-1]
        dims = specs.get(short, ((),) * len(weight.shape))
        shape = (weight.num, *weight.shape) if stacked else weight.shape
        place = layout.sharding(*((circular.STAGE,), *dims) if stacked else dims)
        found[weight.name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
    return found


def numbers_of(table: ModelTable, dtype: str, stages: int, microbatches: int, loss_parts: int) -> circular.Numbers:
    form = table.architecture
    return circular.Numbers(
        eps=form.norm_eps,
        frequencies=form.rope.inverse_frequencies(form.attention.rotary_dim),
        dtype=jnp.dtype(dtype),
        stages=stages,
        microbatches=microbatches,
        loss_parts=loss_parts,
    )


def plain(q_BLHD: jax.Array, k_BLKD: jax.Array, v_BLKD: jax.Array, segments_BL: jax.Array) -> jax.Array:
    """Attention of a few tokens, all scores at one time."""
    from benchmarks.handwritten.layers import attend

    in_order = jnp.arange(q_BLHD.shape[1])
    mask = (segments_BL[:, :, None] == segments_BL[:, None]) & (in_order[:, None] >= in_order)[None]
    return attend(q_BLHD, k_BLKD, v_BLKD, mask, q_BLHD.shape[-1] ** -0.5)


def splash(q_BLHD: jax.Array, k_BLKD: jax.Array, v_BLKD: jax.Array, segments_BL: jax.Array) -> jax.Array:
    """JAX's kernel for TPU, which MaxText calls too."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, L, H, D = q_BLHD.shape
    mask = masks.MultiHeadMask([masks.CausalMask((L, L))] * H)
    block = min(512, L)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = kernel.BlockSizes(**dict.fromkeys(names, block))
    attend = kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)

    def of_row(q_LHD: jax.Array, k_LKD: jax.Array, v_LKD: jax.Array, segments_L: jax.Array) -> jax.Array:
        q_HLD, k_KLD, v_KLD = (one.swapaxes(0, 1) for one in (q_LHD * D**-0.5, k_LKD, v_LKD))
        out_HLD = attend(q_HLD, k_KLD, v_KLD, kernel.SegmentIds(segments_L, segments_L))
        assert not isinstance(out_HLD, tuple)
        return out_HLD.swapaxes(0, 1)

    return jax.vmap(of_row)(q_BLHD, k_BLKD, v_BLKD, segments_BL)


def _columns(stats: Stats) -> list[str]:
    return [f"{one / GIB:.2f} GiB" for one in (stats.arguments_bytes, stats.temporaries_bytes, stats.peak_bytes)]


if __name__ == "__main__":
    main()
