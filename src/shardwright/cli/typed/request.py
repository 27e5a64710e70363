"""From the options to a request, with the defaults of the options that were not given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.values import above_zero, at_least_one, mesh_sizes, moves, settings
from shardwright.core.findings.errors import InputError
from shardwright.core.layout.layout import Layout
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.layouts import load_layout
from shardwright.models import build

if TYPE_CHECKING:
    from shardwright.cost import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedRequest:
    """A request, the defaults that were used, by option (``--batch`` to ``8``), and the chips."""

    request: Request
    chosen: Mapping[str, str] = field(default_factory=dict)
    machine: Machine | None = None


def typed_request(model: str, layout_name: str | None, options: PlanOptions) -> TypedRequest:
    """The request of one model under one layout.

    Without a layout and a mesh, both are the model's natural ones. The natural mesh is not used when another number of
    devices is requested. Raises InputError for values that cannot be read.
    """
    table = build(model, settings(options.set))
    chosen: dict[str, str] = {}
    if layout_name is None:
        chosen["--layout"] = table.natural_layout
    layout = load_layout(table.natural_layout if layout_name is None else layout_name)
    sizes = mesh_sizes(options.mesh) if options.mesh is not None else {}
    at_least_one("--devices", options.devices)
    above_zero("--expert-buffer", options.expert_buffer)
    machine = None if options.chips is None else _machine(options.chips)
    devices = options.devices
    if machine is not None:
        if devices not in (None, machine.num_devices):
            raise InputError(
                f"--chips {options.chips} has {machine.num_devices} devices, and --devices is {devices}. Leave one out."
            )
        devices = machine.num_devices
    if layout_name is None and options.mesh is None and table.natural_mesh:
        natural = dict(table.natural_mesh)
        if devices in (None, prod(natural.values())):
            sizes = natural
            chosen["--mesh"] = ",".join(f"{axis}={size}" for axis, size in natural.items())
    request = Request(
        layout=_moved(layout, options.move),
        table=table,
        batch=_natural("--batch", options.batch, table.natural_batch, table, chosen),
        length=_natural("--length", options.length, table.natural_length, table, chosen),
        mesh_sizes=sizes,
        devices=devices,
        engine="torch" if _taken("--engine", options.engine, "jax", chosen) == "torch" else "jax",
        dtype=_taken("--dtype", options.dtype, table.dtype, chosen),
        weights_dtype=_taken("--weights-dtype", options.weights_dtype, "float32", chosen),
        moments_dtype=_taken("--moments-dtype", options.moments_dtype, "float32", chosen),
        remat=_taken("--remat", options.remat, "full", chosen),
        microbatches=_natural("--microbatches", options.microbatches, 1, table, chosen),
        load_balanced=options.load_balance,
        expert_buffer=options.expert_buffer,
        chip=None if machine is None else machine.chip,
    )
    return TypedRequest(request=request, chosen=chosen, machine=machine)


def planned(typed: TypedRequest) -> Plan:
    """The plan of a request, with times where chips are given. Raises FindingsError where there can be no plan."""
    plan = make_plan(typed.request)
    if typed.machine is None:
        return plan
    from shardwright.cost import price

    return price(plan, typed.machine)


def with_sizes(request: Request, sizes: Mapping[str, int]) -> Request:
    """The request with other sizes for some axes."""
    return replace(request, mesh_sizes={**request.mesh_sizes, **sizes})


def _moved(layout: Layout, text: str | None) -> Layout:
    if text is None:
        return layout
    how = moves(text)
    return replace(
        layout,
        move_attention=how.get("attention", layout.move_attention),
        move_moe=how.get("moe", layout.move_moe),
    )


def _taken(option: str, value: str | None, default: str, chosen: dict[str, str]) -> str:
    if value is None:
        chosen[option] = default
        return default
    return value


def _natural(option: str, value: int | None, natural: int | None, table: ModelTable, chosen: dict[str, str]) -> int:
    at_least_one(option, value)
    if value is not None:
        return value
    if natural is None:
        raise InputError(f"{table.name} has no value of its own for {option}. Give one.")
    chosen[option] = str(natural)
    return natural


def _machine(text: str) -> Machine:
    # Loaded only when chips are given.
    from shardwright.cost import read_machine

    return read_machine(text)
