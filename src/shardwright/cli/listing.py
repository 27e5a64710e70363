"""`shardwright list`: the names that options take, each with what tells it from the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.verbs import ListVerb
from shardwright.core.findings.codes import CODES
from shardwright.core.recipes.presets import PRESETS
from shardwright.layouts import load_layout, load_recipe, preset_names
from shardwright.models import build, names
from shardwright.training.optimizers import OPTIMIZERS

SHOWN = (("output", "weight"), ("output", "input"), ("input_gradient", "output_gradient"))
"""The operands of a recipe that a list shows, by product."""

Row = Mapping[str, str | int | float]


def run_list(verb: ListVerb) -> int:
    """Print the list."""
    rows = LISTS[verb.of]()
    if verb.json:
        write_json({verb.of: rows})
    else:
        from shardwright.report.list_view import list_view

        write_view(list_view(rows), sys.stdout)
    return 0


def _models() -> Sequence[Row]:
    tables = (build(name) for name in names())
    return [
        {
            "name": table.name,
            "parameters": table.num_parameters,
            "layers": table.num_layers,
            "layout": table.natural_layout,
        }
        for table in tables
    ]


def _layouts() -> Sequence[Row]:
    return [{"name": name, "about": load_layout(name).about} for name in preset_names()]


def _chips() -> Sequence[Row]:
    from shardwright.cost.hardware.chips import chips

    return [
        {
            "name": kind,
            "chip": numbers.name,
            "bytes": numbers.chip.usable_bytes,
            "bf16_flops_per_s": numbers.read("bf16_flops_per_s"),
            "as": f"{kind}:{'x'.join('4' * numbers.integer('torus_dims'))}"
            if numbers.network == "torus"
            else f"{kind}:4x{numbers.integer('domain_devices')}",
        }
        for kind, numbers in chips().items()
    ]


def _recipes() -> Sequence[Row]:
    recipes = ((name, load_recipe(name)) for name in PRESETS)
    return [
        {
            "name": name,
            **{
                operand: f"{quantizer.dtype}, {quantizer.block.text}, {quantizer.amax} amax"
                for (product, operand), quantizer in recipe.quantizers.items()
                if (product, operand) in SHOWN
            },
        }
        for name, recipe in recipes
    ]


def _optimizers() -> Sequence[Row]:
    return [
        {
            "name": name,
            "keeps": ", ".join(prefix.rstrip("/").rpartition("/")[2] for prefix in row.kept),
            "constants": ", ".join(f"{key}={constant.default}" for key, constant in row.constants.items()),
            "source": row.source,
        }
        for name, row in OPTIMIZERS.items()
    ]


def _findings() -> Sequence[Row]:
    return [{"name": code.code, "severity": code.severity, "title": code.title} for code in CODES.values()]


LISTS: Mapping[str, Callable[[], Sequence[Row]]] = {
    "models": _models,
    "layouts": _layouts,
    "chips": _chips,
    "recipes": _recipes,
    "optimizers": _optimizers,
    "findings": _findings,
}
