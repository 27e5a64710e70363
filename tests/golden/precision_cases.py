"""The cases of recipes of low precision: what is not free of the layout, shards inside blocks, and recipes that no engine runs."""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.recipes.presets import preset
from shardwright.cost.hardware.chips import chip_of
from tests.golden.findings_case import Case, mine

FSDP = mine("fsdp: fsdp", "{fsdp: auto}")
TENSOR = mine("tensor: tensor", "{tensor: auto}")
A100, H100, B200 = (chip_of(kind).chip for kind in ("a100", "h100", "b200"))
ROW, CURRENT = preset("fp8-row"), preset("fp8-current")
RESTING = replace(CURRENT, rest_quantized=True)

ON_PRECISION: tuple[Case, ...] = (
    Case(
        name="SW404-microbatches",
        layout=FSDP,
        options={"devices": 4, "precision": "fp8-current", "microbatches": 2},
        neighbour={"options": {"devices": 4, "precision": "fp8-current"}},
    ),
    Case(
        name="SW404-not-reduced",
        layout=FSDP,
        options={"devices": 4, "precision": replace(CURRENT, reduce_amax=False)},
        neighbour={"options": {"devices": 4, "precision": CURRENT}},
    ),
    Case(
        name="SW404-tokens-of-experts",
        model="mixtral-test",
        layout="ep",
        options={"devices": 4, "precision": "mxfp8"},
        neighbour={"options": {"devices": 4, "precision": ROW}},
    ),
    Case(
        name="SW404-chunks-of-a-row",
        layout="cp",
        options={"devices": 8, "length": 64, "precision": "fp8-block"},
        neighbour={"options": {"devices": 8, "length": 256, "precision": "fp8-block", "mesh_sizes": {"context": 2}}},
    ),
    Case(
        name="SW404-partial",
        model="deepseek3-test",
        layout="tp",
        options={"devices": 2, "precision": "mxfp8"},
        neighbour={"options": {"devices": 1, "precision": "mxfp8"}},
    ),
    Case(
        name="SW404-random-numbers",
        layout=FSDP,
        options={"devices": 4, "precision": replace(preset("nvfp4"), counter_based=False)},
        neighbour={"options": {"devices": 4, "precision": "nvfp4"}},
    ),
    Case(
        name="SW416-hidden-units",
        layout=TENSOR,
        options={"devices": 16, "precision": "fp8-block"},
        neighbour={"options": {"devices": 16, "precision": "fp8-row"}},
    ),
    Case(
        name="SW416-gathered",
        layout=FSDP,
        options={"devices": 16, "precision": replace(preset("mxfp8"), gather_quantized=True)},
        neighbour={"options": {"devices": 16, "precision": "mxfp8"}},
    ),
    Case(
        name="SW417-blocks-on-h100",
        layout=FSDP,
        options={"devices": 4, "precision": "mxfp8", "chip": H100},
        neighbour={"options": {"devices": 4, "precision": "mxfp8", "chip": B200}},
    ),
    Case(
        name="SW417-pytorch-in-float32",
        layout=FSDP,
        options={"devices": 4, "precision": "mxfp8", "chip": B200, "engine": "torch", "dtype": "float32"},
        neighbour={
            "options": {"devices": 4, "precision": "mxfp8", "chip": B200, "engine": "torch", "dtype": "bfloat16"}
        },
    ),
    Case(
        name="SW417-on-one-device",
        layout=FSDP,
        options={"devices": 1, "precision": "nvfp4", "chip": H100, "engine": "torch", "dtype": "bfloat16"},
        neighbour={
            "options": {"devices": 1, "precision": "nvfp4", "chip": B200, "engine": "torch", "dtype": "bfloat16"}
        },
    ),
    Case(
        name="SW417-tokens-of-experts",
        model="mixtral-test",
        layout="ep",
        options={"devices": 4, "precision": "mxfp8", "chip": B200},
        neighbour={"options": {"devices": 4, "precision": "fp8-current", "chip": B200}},
    ),
    Case(
        name="SW417-a-chip-without",
        layout=FSDP,
        options={"devices": 4, "precision": "fp8-current", "chip": A100},
        neighbour={"options": {"devices": 4, "precision": "fp8-current", "chip": H100}},
    ),
    Case(
        name="SW415-recipe",
        layout=FSDP,
        options={"devices": 4, "precision": replace(preset("fp8-delayed"), reduce_amax=False)},
        neighbour={"options": {"devices": 4, "precision": "fp8-delayed"}},
    ),
    Case(
        name="SW415-dispatch",
        model="mixtral-test",
        layout="ep",
        options={"devices": 4, "precision": replace(CURRENT, dispatch_quantized=True)},
        neighbour={"options": {"devices": 4, "precision": replace(ROW, dispatch_quantized=True)}},
    ),
    Case(
        name="SW415-resting",
        layout=FSDP,
        options={"devices": 4, "precision": RESTING},
        neighbour={
            "options": {"devices": 4, "precision": RESTING, "weights_dtype": "bfloat16", "master_dtype": "float32"}
        },
    ),
)
