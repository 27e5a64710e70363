"""Shardwright: one declaration of a layout, checked, costed and run unchanged on JAX and PyTorch.

The front door of the core. Importing it loads no framework; ``shardwright.engine_jax`` does.
"""

from shardwright.core.findings.errors import FindingsError, InputError, NotationError, ShardwrightError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import located
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.core.mesh.notation import parse as parse_spec
from shardwright.core.mesh.spec import DimSpec, Spec
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.planning import make_plan
from shardwright.core.recipes.recipe import Recipe
from shardwright.core.resolution.own_model import activation_spec, table_of
from shardwright.core.resolution.request import Chip, Request
from shardwright.layouts import load_layout, load_recipe, preset_names
from shardwright.models import build as model_table

__all__ = [
    "Axis",
    "Chip",
    "DimSpec",
    "Finding",
    "FindingsError",
    "InputError",
    "Layout",
    "Mesh",
    "NotationError",
    "Plan",
    "Recipe",
    "Request",
    "ShardwrightError",
    "Spec",
    "TensorPlan",
    "activation_spec",
    "load_layout",
    "load_recipe",
    "located",
    "make_plan",
    "model_table",
    "parse_spec",
    "preset_names",
    "read_layout",
    "table_of",
]
