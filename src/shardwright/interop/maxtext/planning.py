"""What a configuration is planned with: the request of its step, and the slices and devices that its keys give.

| key | here |
|---|---|
| ``gradient_accumulation_steps`` | microbatches, and as many times the rows of one |
| ``num_pipeline_microbatches`` | microbatches |
| ``num_vocab_tiling`` | ``--loss-chunks`` |
| ``ragged_buffer_factor`` | ``--expert-buffer``, where an axis shards the experts |
| ``context_parallel_load_balance`` | ``--load-balance``, where an axis shards the rows of attention |
| ``context_parallel_strategy`` | ``move: {attention: ring}`` or ``ulysses``, likewise |
| ``use_ring_of_experts`` | ``move: {moe: ring}``, where an axis shards the experts |
| ``dtype``, ``weight_dtype``, ``grad_dtype``, ``mu_dtype`` | dtypes of the computation, of weights, gradients and moments |
| ``compile_topology``, ``compile_topology_num_slices``, ``num_slices`` | ``--devices`` and ``--slices`` |
"""

from __future__ import annotations

import re
from dataclasses import replace

from shardwright.core.layout.layout import Layout
from shardwright.core.model.precision import TRAINED_IN
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.resolution.request import Request
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.resolution.placement import Imported
from shardwright.interop.maxtext.stages import PipelineSettings

CORES_OF_DEVICE = {"v4": 2, "v5p": 2, "v5e": 1, "v6e": 1, "tpu7x": 1}
"""What the number in a name of a topology counts, in each device: ``v5p-256`` has 128."""


def with_moves(layout: Layout, configuration: Configuration) -> Layout:
    """The layout with the movements that keys of the configuration choose."""
    strategy = str(configuration.value_of("context_parallel_strategy")).lower()
    if strategy in ("ring", "ulysses") and _has(layout, "context", "attention"):
        layout = replace(layout, move_attention="ring" if strategy == "ring" else "ulysses")
    if configuration.value_of("use_ring_of_experts") is True and _has(layout, "expert", "moe"):
        layout = replace(layout, move_moe="ring")
    return layout


def request_of(imported: Imported, layout: Layout, pipeline: PipelineSettings | None) -> Request:
    """The request of a configuration's step under the layout of its rules."""
    configuration, step = imported.configuration, imported.step
    weights = _trained_in(step.weight_dtype, "float32")
    gradients = _trained_in(configuration.value_of("grad_dtype"), weights)
    first_moment = _trained_in(configuration.value_of("mu_dtype"), weights)
    passes = accumulated(configuration)
    buffer = configuration.value_of("ragged_buffer_factor")
    return Request(
        layout=layout,
        table=imported.table,
        batch=step.batch * passes,
        length=step.length,
        microbatches=passes * (1 if pipeline is None else pipeline.microbatches),
        loss_chunks=max(1, int(configuration.value_of("num_vocab_tiling") or 1)),
        dtype=_trained_in(step.dtype, "bfloat16"),
        weights_dtype=weights,
        gradients_dtype=gradients if DTYPE_BYTES[gradients] > DTYPE_BYTES[weights] else None,
        moments_dtype=weights if first_moment == weights else f"{first_moment},{weights}",
        expert_buffer=float(buffer)
        if buffer is not None and float(buffer) > 0 and _has(layout, "expert", "moe")
        else None,
        load_balanced=configuration.value_of("context_parallel_load_balance") is True
        and _has(layout, "context", "attention"),
    )


def accumulated(configuration: Configuration) -> int:
    """The passes of a step, each with its own rows."""
    return max(1, int(configuration.value_of("gradient_accumulation_steps") or 1))


def slices_of(configuration: Configuration) -> int:
    """The slices that a configuration states; 1 where it states none."""
    stated = (configuration.value_of(key) for key in ("compile_topology_num_slices", "num_slices"))
    return next((int(number) for number in stated if number is not None and int(number) > 0), 1)


def devices_of_slice(configuration: Configuration) -> int | None:
    """The devices of the topology that a configuration compiles for; None for none, and for that of a GPU.

    >>> from shardwright.interop.maxtext.reading.reading import parse_given
    >>> devices_of_slice(Configuration(sources=(), mesh_axes=(), rules=(), settings=parse_given(("compile_topology=v5p-256",)).settings))
    128
    """
    name = re.fullmatch(r"(\w+)-([0-9]{1,6})", str(configuration.value_of("compile_topology") or ""))
    if name is None or name[1] not in CORES_OF_DEVICE:
        return None
    return int(name[2]) // CORES_OF_DEVICE[name[1]] or None


def _has(layout: Layout, role: str, component: str) -> bool:
    return bool(layout.axes_with(role, component))


def _trained_in(dtype: object, default: str) -> str:
    return str(dtype) if dtype in TRAINED_IN else default
