"""Model tables by name: ``build("deepseek3-671b", {"num_layers": "4"})``. No framework is loaded.

overrides.py     any dimension of a model set from text
hugging_face.py  names and dims of published checkpoints

parts/       shared by families: the numbers of an architecture
layers/      shared by families: attention, feed-forward layers, experts, embedding and logits, as programs
llama3/      test, 1b, 8b, 70b, 405b
mixtral/     test, 8x7b, 8x22b
deepseek3/   test, 16b, 671b
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.model.table import ModelTable
from shardwright.models.deepseek3 import sizes as deepseek3_sizes
from shardwright.models.deepseek3 import table as deepseek3_table
from shardwright.models.llama3 import sizes as llama3_sizes
from shardwright.models.llama3 import table as llama3_table
from shardwright.models.mixtral import sizes as mixtral_sizes
from shardwright.models.mixtral import table as mixtral_table
from shardwright.models.overrides import overridden
from shardwright.models.parts.size import Size

FAMILIES: Mapping[str, tuple[Mapping[str, Size], Callable[[str, Size], ModelTable]]] = {
    "llama3": (llama3_sizes.SIZES, llama3_table.table),
    "mixtral": (mixtral_sizes.SIZES, mixtral_table.table),
    "deepseek3": (deepseek3_sizes.SIZES, deepseek3_table.table),
}


def names() -> tuple[str, ...]:
    """Every model by name, families in order, small sizes first."""
    return tuple(_builders())


def build(name: str, overrides: Mapping[str, str] | None = None) -> ModelTable:
    """The table of a model, with any of its dimensions replaced.

    Raises InputError for an unknown name or dimension, and for inconsistent dimensions.

    >>> build("llama3-8b").num_parameters
    8030261248
    >>> build("deepseek3-671b", {"num_layers": "4"}).num_layers
    4
    """
    builders = _builders()
    if name not in builders:
        raise InputError(f"no model '{name}'. {did_you_mean(name, builders)}")
    make, size = builders[name]
    if overrides:
        size = replace(size, config=overridden(name, size.config, overrides))
    return make(size)


def _builders() -> dict[str, tuple[Callable[[Size], ModelTable], Size]]:
    return {
        f"{family}-{size_name}": (partial(make, f"{family}-{size_name}"), size)
        for family, (sizes, make) in FAMILIES.items()
        for size_name, size in sizes.items()
    }
