"""From the options to a request, with the defaults of the options that were not given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING

from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.values import above_zero, at_least_one, mesh_sizes, moves, settings
from shardwright.core.engines.engines import DEFAULT_ENGINE, engine_named
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.hops import AUTO
from shardwright.core.model.optimizer import ADAMW, Optimizer
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.mesh_sizes import Sizes, mesh_text
from shardwright.core.resolution.request import Request
from shardwright.layouts import load_layout, load_policy, load_recipe
from shardwright.models import build
from shardwright.training.named import OURS
from shardwright.training.optimizers import ENGINES, check_here, optimizer_of

if TYPE_CHECKING:
    from shardwright.core.layout.auto import AutoChoice
    from shardwright.cost import Machine
    from shardwright.search import Arrangement


STEP = ("batch", "microbatches", "loss_chunks")
"""The options of a step that may be chosen for chips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedRequest:
    """A request, the defaults that were used, by option (``--batch`` to ``8``), and the chips. ``for_chips``: those of them that were chosen for
    the chips. ``choice``: of layout and mesh, where they were. ``moves``: what was typed of it, which any other layout takes too."""

    request: Request
    chosen: Mapping[str, str] = field(default_factory=dict)
    machine: Machine | None = None
    choice: AutoChoice | None = None
    for_chips: Mapping[str, str] = field(default_factory=dict)
    moves: str | None = None


def requested(model: str, layout_name: str | None, options: PlanOptions) -> TypedRequest:
    """The request of a command line, whatever its verb: what is left open is chosen for the chips, where there are some.

    Raises InputError for values that cannot be read.
    """
    return with_choice(typed_request(model, layout_name, options), layout_name, options)


def as_typed(typed: TypedRequest, layout_name: str | None, options: PlanOptions) -> tuple[str | None, PlanOptions]:
    """The layout and the options with what was chosen for the chips as if it had been typed. What is written to a file has them: a later
    choice may be another."""
    said = dict(typed.for_chips)
    layout = said.pop("--layout", layout_name)
    fields = {option.removeprefix("--").replace("-", "_"): value for option, value in said.items()}
    counts = {name: int(value) for name, value in fields.items() if name in STEP}
    return layout, replace(options, **{**fields, **counts})


def options_text(options: Mapping[str, str]) -> str:
    """
    >>> options_text({"--layout": "fsdp", "--batch": "256"})
    '--layout fsdp --batch 256'
    """
    return " ".join(f"{option} {value}" for option, value in options.items())


def typed_request(model: str, layout_name: str | None, options: PlanOptions) -> TypedRequest:
    """The request of one model under one layout, with nothing chosen for the chips.

    Without a layout and a mesh, both are the model's natural ones. The natural mesh is not used when another number of
    devices is requested. Raises InputError for values that cannot be read.
    """
    table = build(model, settings(options.set))
    if options.training_only is not None:
        table = replace(table, training_only=options.training_only)
    chosen: dict[str, str] = {}
    if layout_name is None:
        chosen["--layout"] = table.natural_layout
    layout = load_layout(table.natural_layout if layout_name is None else layout_name)
    sizes: Sizes = mesh_sizes(options.mesh) if options.mesh is not None else {}
    at_least_one("--devices", options.devices)
    at_least_one("--loss-chunks", options.loss_chunks)
    above_zero("--expert-buffer", options.expert_buffer)
    machine = None if options.chips is None else _machine(options.chips)
    devices = options.devices
    if machine is not None:
        if devices not in (None, machine.num_devices):
            raise InputError(
                f"--chips {options.chips} has {machine.num_devices} devices, and --devices is {devices}. Leave one out."
            )
        devices = machine.num_devices
    natural = dict(table.natural_mesh or {}) if layout_name is None and options.mesh is None else {}
    if natural and devices in (None, prod(natural.values())):
        sizes = natural
        chosen["--mesh"] = mesh_text(natural)
    request = Request(
        layout=_moved(layout, options.move),
        table=table,
        batch=_natural("--batch", options.batch, table.natural_batch, table, chosen),
        length=_natural("--length", options.length, table.natural_length, table, chosen),
        mesh_sizes=sizes,
        devices=devices,
        engine=engine_named(_taken("--engine", options.engine, DEFAULT_ENGINE, chosen)),
        dtype=_taken("--dtype", options.dtype, table.dtype, chosen),
        weights_dtype=_taken("--weights-dtype", options.weights_dtype, "float32", chosen),
        moments_dtype=_taken("--moments-dtype", options.moments_dtype, "float32", chosen),
        master_dtype=options.master_dtype,
        gradients_dtype=options.gradients_dtype,
        remat=load_policy(_taken("--remat", options.remat, "full", chosen), "--remat"),
        microbatches=_natural("--microbatches", options.microbatches, 1, table, chosen),
        loss_chunks=1 if options.loss_chunks is None else options.loss_chunks,
        load_balanced=options.load_balance,
        expert_buffer=options.expert_buffer,
        optimizer=_optimizer(options, table),
        average=_share("--average", options.average),
        precision=None if options.precision is None else load_recipe(options.precision),
        schedule=options.schedule,
        stages=options.stages,
        hops=options.hops or AUTO,
        chip=None if machine is None else machine.chip,
        training_tokens=options.tokens,
        device_hour_price=options.price,
        besides=options.besides,
    )
    return TypedRequest(request=request, chosen=chosen, machine=machine, moves=options.move)


def planned(typed: TypedRequest) -> Plan:
    """The plan of a request, with times where chips are given. Raises FindingsError where there can be no plan."""
    if typed.machine is None:
        return make_plan(typed.request)
    from shardwright.cost import price, with_unit_costs

    machine = typed.machine
    elsewhere = [
        arrangement.candidate
        for arrangement in _arranged(typed)
        if arrangement.layout.name != typed.request.layout.name
    ]
    plan = price(make_plan(typed.request, partial(with_unit_costs, machine=machine)), machine, elsewhere)
    return plan if typed.choice is None else replace(plan, choices=(typed.choice, *plan.choices))


def with_choice(typed: TypedRequest, layout_name: str | None, options: PlanOptions) -> TypedRequest:
    """The request with a layout, a mesh and a step that are chosen for its chips where neither layout nor mesh was typed; where one was, and no
    batch, with rows that all devices share. Unchanged without chips."""
    if typed.machine is None or typed.machine.numbers is None:
        return typed
    from shardwright.search import choose_defaults

    free = layout_name is None and options.mesh is None
    kept = {f"--{name.replace('_', '-')}" for name in STEP if getattr(options, name) is not None}
    if not free:
        # The user's mesh is kept, and so is what else the step is made of.
        kept |= {"--microbatches", "--loss-chunks"}
        if "--batch" in kept:
            return typed
    chosen = choose_defaults(typed.request, typed.machine, _arranged(typed) if free else (), kept)
    if chosen is None:
        return typed
    said = {
        option: value
        for option, value in chosen.options.items()
        if option not in kept and (free or option == "--batch")
    }
    return replace(
        typed,
        request=chosen.request if free else replace(typed.request, batch=chosen.request.batch),
        chosen={**typed.chosen, **said},
        choice=chosen.choice if free else None,
        for_chips=said,
    )


def _arranged(typed: TypedRequest) -> Sequence[Arrangement]:
    """The presets on the chips, each with sizes of its axes; none on simulated devices."""
    from shardwright.search import arrangements, presets_for

    table, machine = typed.request.table, typed.machine
    if machine is None or machine.numbers is None:
        return ()
    return arrangements(table, machine, [_moved(load_layout(name), typed.moves) for name in presets_for(table)])


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


def _optimizer(options: PlanOptions, table: ModelTable) -> Optimizer:
    """The optimizer by name, with its constants. Raises InputError for a name or a constant that does not exist.

    Only for an engine's own optimizer the engine is loaded: no other program knows what it keeps.
    """
    given = settings(options.optimizer_set, "--optimizer-set")
    library, colon, name = (options.optimizer or ADAMW.name).partition(":")
    if not colon:
        return optimizer_of(library, given)
    if library not in ENGINES:
        raise InputError(f"--optimizer: '{options.optimizer}' names '{library}'. {did_you_mean(library, ENGINES)}")
    check_here(name)
    engine = engine_named(options.engine)
    if ENGINES[library] != engine:
        raise InputError(
            f"--optimizer {options.optimizer} is of {library}, and --engine is {engine}. Give --engine {ENGINES[library]}. {OURS}"
        )
    dtypes = {"weights": options.weights_dtype, "moments": options.moments_dtype, "gradients": options.gradients_dtype}
    for option, dtype in ((f"--{name}-dtype", dtype) for name, dtype in dtypes.items()):
        if dtype not in (None, "float32"):
            raise InputError(
                f"--optimizer {options.optimizer} computes in the dtype of what it is given, and {option} is {dtype}. "
                f"Leave {option} out. {OURS}"
            )
    with needing_extra(engine, f"an optimizer of {library}"):
        described = import_module(f"shardwright.engine_{engine}.training.named_optimizer").described
    shapes = {w.name: (w.num, *w.shape) if w.stack else w.shape for w in table.weights if not w.frozen}
    return described(name, given, shapes, [w.name for w in table.weights if w.stack and w.name in shapes])


def _share(option: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < 1:
        raise InputError(f"{option} is {value:g}, and must be above 0 and below 1, as 0.999.")
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
