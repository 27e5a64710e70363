"""Seconds that the host takes to start the kernels of a layer of experts, which a device waits for where they are longer than its own.

Megatron-Core's programs (``fused``) start each kernel from Python, and Transformer Engine multiplies by each expert's matrix on its own. With few
rows in a microbatch such kernels take less time than starting them. The parts of a layer alternate, and each takes what is longer: its
products, or their starts.

| what, in one layer and microbatch | kernels forward | backward |
|---|---:|---:|
| attention: norms, products, rotary embedding, what quantizes | 25 | 50 |
| router: scores, the choice, counts, and the permutations around the exchange | 40 | 60 |
| experts: for each expert of the device, its two products | 2 | 4 |
| the same of quantized operands: the codes of an operand, and the order of its scales | 6 | 12 |

Graphs are started at once: a file of chips says which parts are in one (``graphs``), or that all of a step is. Dense layers have larger kernels
than starts: in no published step would they count.

Sources: TransformerEngine, transformer_engine/pytorch/module/grouped_linear.py and cpp_extensions/gemm.py (one product an expert, over
several streams); Megatron-LM, megatron/core/transformer/moe/token_dispatcher.py; counted there. ``LAUNCH_S`` is fitted: to the steps of 30B with one row in
a microbatch on 8 B200 (docs/published-fresh.md), whose layers of 16 experts take 8.8 ms where their kernels take 3.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from shardwright.core.plan.plan import Phase, Plan, layers_on_device
from shardwright.cost.hardware.chips import ChipNumbers

LAUNCH_S = 17e-6
"""Seconds from one kernel's start to the next, with Python's share."""

PARTS: Mapping[str, tuple[int, int]] = {"attention": (25, 50), "router": (40, 60)}
"""Kernels of a part of a layer with experts, forward and backward."""

OF_AN_EXPERT, OF_A_QUANTIZED_EXPERT = (2, 4), (6, 12)
STEP = "step"


def launch_seconds(plan: Plan, chip: ChipNumbers) -> Iterator[tuple[tuple[str, Phase], float]]:
    """Of each component and phase, what the host takes to start its kernels in a step: of models with experts, in programs that start them one by one."""
    table = plan.request.table
    matrices = [weight for weight in table.weights if "experts" in weight.logical_axes]
    if not table.top_k or not matrices or chip.network == "torus" or STEP in chip.graphs:
        return
    row = plan.by_name[matrices[0].name]
    layers = layers_on_device(plan.request, plan.mesh, row) * plan.request.microbatches
    experts = ceil(matrices[0].size("experts") / plan.mesh.size(row.in_use.axes_of("experts")))
    quantized = any(weight.name == row.name for weight in plan.quantized)
    forward, backward = OF_A_QUANTIZED_EXPERT if quantized else OF_AN_EXPERT
    kernels = {**PARTS, "moe": (forward * experts, backward * experts)}
    for part, (of_forward, of_backward) in kernels.items():
        if part not in chip.graphs:
            yield (part, "forward"), LAUNCH_S * layers * of_forward
            yield (part, "backward"), LAUNCH_S * layers * of_backward
