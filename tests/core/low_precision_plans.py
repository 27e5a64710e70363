"""Plans of small models with a recipe of low precision."""

from __future__ import annotations

from shardwright import Request, load_layout, model_table
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.quantization.quantized import QuantizedOperand
from shardwright.core.recipes.recipe import Recipe

SMALL = {"num_layers": "1", "embed": "64", "num_heads": "8", "num_kv_heads": "8", "mlp": "128", "vocab": "64"}


def planned(layout: str, sizes: dict[str, int], recipe: Recipe, **options) -> Plan:
    table = model_table("llama3-test", SMALL)
    given = {"batch": 8, "length": 64, "engine": "jax", **options}
    return resolve(Request(layout=load_layout(layout), table=table, mesh_sizes=sizes, precision=recipe, **given))


def operand_of(plan: Plan, weight: str, product: str, operand: str) -> QuantizedOperand:
    row = next(row for row in plan.quantized if row.name.endswith(weight))
    return next(one for one in row.operands if (one.product, one.operand) == (product, operand))


def of_experts(layout: str, sizes: dict[str, int], recipe: Recipe) -> Plan:
    settings_of = {
        "num_layers": "1",
        "embed": "64",
        "num_heads": "4",
        "num_kv_heads": "4",
        "mlp": "32",
        "num_experts": "4",
    }
    table = model_table("mixtral-test", settings_of)
    given = {"batch": 8, "length": 32, "mesh_sizes": sizes, "precision": recipe}
    return resolve(Request(layout=load_layout(layout), table=table, **given))
