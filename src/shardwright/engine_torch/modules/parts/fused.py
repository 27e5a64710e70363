"""Weights as Transformer Engine's checkpoints have them: parts of one input in one tensor, of which a rank of tp has its own rows.

| in its checkpoint | here |
|---|---|
| ``weight`` of queries, keys and values, interleaved: for each group its queries, its key and its value | ``query_weight``, ``key_weight``, ``value_weight`` |
| ``weight`` of them one after the other | the same |
| ``fc1_weight`` of a gated layer: the gate, then the other | ``fc1_gate_weight``, ``fc1_weight`` |
| ``_extra_state``, ``inv_freq`` | nothing: they are not read |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.core.findings.errors import InputError

Tensors = Mapping[str, torch.Tensor]
UNREAD = ("_extra_state", "inv_freq")
"""How names of a checkpoint end that no parameter has: pickled state of its recipes, and what angles are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """One tensor of several parameters, ``kind`` ``weight`` or ``bias``. ``rows``: of each, on all ranks. ``groups``: into so many groups
    they are interleaved; 1: one lies after the other."""

    name: str
    rows: Mapping[str, int]
    groups: int

    def parted(self, tensor: torch.Tensor, num: int) -> dict[str, torch.Tensor]:
        """The parameters of one of ``num`` ranks of tp. Raises InputError for another number of rows."""
        sizes = [rows // self.groups for rows in self.rows.values()]
        groups = max(1, self.groups // num) if self.groups > 1 else 1
        sizes = sizes if self.groups > 1 else [size // num for size in sizes]
        if tensor.shape[0] != groups * sum(sizes):
            raise InputError(
                f"'{self.name}' of the checkpoint has {tensor.shape[0]} rows, and {', '.join(self.rows)} have {groups * sum(sizes)} "
                f"on one of {num} ranks. Give the checkpoint of every rank of tp, in their order."
            )
        parts = tensor.unflatten(0, (groups, -1)).split(sizes, dim=1)
        return {name: part.flatten(0, 1) for name, part in zip(self.rows, parts, strict=True)}

    def joined(self, parts: Tensors) -> torch.Tensor:
        """The tensor of one rank that has all."""
        grouped = [parts[name].unflatten(0, (self.groups, -1)) for name in self.rows]
        return torch.cat(grouped, dim=1).flatten(0, 1)


def from_transformer_engine(module: nn.Module, states: Tensors | Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """The entire parameters of a module of these modules, by its names, of a checkpoint of Transformer Engine's.

    ``states``: the ``state_dict`` of the same module there, or those of all ranks of tp, in order. ``fuse_qkv_params`` and
    ``qkv_weight_interleaved`` of the module say how queries, keys and values lie in it. No pickle is read.

    Raises InputError for names that one of both does not have.
    """
    ranks = [states] if isinstance(states, Mapping) else list(states)
    fused = {tensor.name: tensor for tensor in _fused(module)}
    wanted = dict(_parameters(module))
    of_ranks: list[dict[str, torch.Tensor]] = []
    for state in ranks:
        parts: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            if name.endswith(UNREAD):
                continue
            parts |= fused[name].parted(tensor, len(ranks)) if name in fused else {name: tensor}
        if parts.keys() != wanted.keys():
            lacking, others = sorted(wanted.keys() - parts.keys()), sorted(parts.keys() - wanted.keys())
            raise InputError(
                f"the checkpoint lacks {', '.join(lacking) or 'nothing'}, and has {', '.join(others) or 'nothing'} that the module lacks. "
                f"Make the module with the arguments of the one that was saved, fuse_qkv_params too."
            )
        of_ranks.append(parts)
    return {
        name: of_ranks[0][name] if dim is None else torch.cat([parts[name] for parts in of_ranks], dim)
        for name, dim in wanted.items()
    }


def to_transformer_engine(module: nn.Module, weights: Tensors) -> dict[str, torch.Tensor]:
    """The inverse, for one rank: by Transformer Engine's names, of entire parameters by those of the module."""
    names = dict(_parameters(module))
    state = {name: tensor for name, tensor in weights.items() if name in names}
    for fused in _fused(module):
        joined = fused.joined(state)
        for name in fused.rows:
            del state[name]
        state[fused.name] = joined
    return state


def _parameters(module: nn.Module) -> Iterator[tuple[str, int | None]]:
    """By name, the dim that tp shards."""
    for prefix, child in _with_specs(module):
        for name, parameter in child.specs.items():
            yield f"{prefix}{name}", parameter.tp_dim


def _fused(module: nn.Module) -> Iterator[Fused]:
    for prefix, child in _with_specs(module):
        for kind in ("weight", "bias"):
            if f"fc1_gate_{kind}" in child.specs:
                # It is the gate that lies first.
                gate, other = f"{prefix}fc1_gate_{kind}", f"{prefix}fc1_{kind}"
                num = child.specs[f"fc1_{kind}"].shape[0]
                yield Fused(name=other, rows={gate: num, other: num}, groups=1)
            groups = getattr(child, "fused_groups", None)
            if groups is not None and any(f"{part}_{kind}" in child.specs for part in child.parts):
                parts = {f"{prefix}{part}_{kind}": rows for part, rows in child.parts.items()}
                yield Fused(name=f"{prefix}{kind}", rows=parts, groups=groups)


def _with_specs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the names of a module's parameters begin with, of those that have any."""
    for name, child in module.named_modules():
        if hasattr(child, "specs"):
            yield f"{name}." if name else "", child
