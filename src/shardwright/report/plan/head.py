"""What a plan is of: model, layout, mesh, batch, computation, groups, and the defaults that were used."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.layout.auto import LAYOUT, AutoChoice
from shardwright.core.model.optimizer import ADAMW
from shardwright.core.plan.plan import Plan
from shardwright.report.text.columns import labelled
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.units import pretty_bytes, pretty_count, pretty_seconds, several


def title(plan: Plan) -> Text:
    """What is planned, in a line."""
    return Text.assemble((plan.request.table.name, "bold"), " under ", (plan.request.layout.name, "bold"))


def head(plan: Plan, colors: AxisColors, chosen: Mapping[str, str], width: int) -> RenderableType:
    """``chosen``: the defaults that were used, by option."""
    request = plan.request
    lines: list[tuple[str, Text]] = [
        ("layout", Text(request.layout.about)),
        ("model", Text(_model(plan))),
        ("mesh", _mesh(plan, colors)),
        ("step", Text(_step(plan))),
        ("computation", Text(_computation(plan))),
        ("optimizer", Text(_optimizer(plan))),
        ("precision", Text(_precision(plan))),
        ("movement", Text(_movement(plan))),
        ("groups", _groups(plan, colors)),
    ]
    choices = [choice for choice in plan.choices if choice.what == LAYOUT]
    lines += [("chosen", Text(_choice(plan, choice))) for choice in choices]
    said = {word for choice in choices for word in choice.chosen.split()}
    defaults = " ".join(f"{option} {value}" for option, value in chosen.items() if not {option, value} <= said)
    if defaults:
        lines.append(("by default", Text(defaults, style="dim")))
    return Group(labelled(lines, width), Text(""))


def _choice(plan: Plan, choice: AutoChoice) -> str:
    """The options that ask for what was chosen, and what it was chosen from; or by how much the nearest misses."""
    limit = None if plan.request.chip is None else plan.request.chip.usable_bytes
    missing = 0 if limit is None else plan.memory.total_bytes_per_device - limit
    if missing > 0:
        return f"{choice.chosen}: the nearest to fitting, {pretty_bytes(missing)} a device too much; nothing that was tried fits"
    others = sorted((seconds, text) for text, seconds in choice.seconds.items() if text != choice.chosen)
    if not others:
        return f"{choice.chosen}: all that was tried and fits"
    if choice.chosen not in choice.seconds:
        return choice.chosen
    (seconds, text), own = others[0], choice.seconds[choice.chosen]
    best = "the fastest" if own <= seconds else "as fast as any, and the smallest of those,"
    return (
        f"{choice.chosen}: {best} of {len(others) + 1} that fit, {pretty_seconds(own)} for these tokens; "
        f"next {text}, {pretty_seconds(seconds)}"
    )


def _model(plan: Plan) -> str:
    table = plan.request.table
    number = pretty_count(table.num_parameters)
    return f"{table.num_parameters:,} parameters ({number}), {several(table.num_layers, 'layer')}"


def _mesh(plan: Plan, colors: AxisColors) -> Text:
    axes = Text(" x ").join([colors.axis(axis, f"{axis} {size}") for axis, size in plan.mesh.shape.items()])
    chip = plan.request.chip
    machine = f" ({chip.machine})" if chip and chip.machine else ""
    kind = f", {chip.name}{machine}" if chip else ""
    return Text.assemble(axes, f" = {several(plan.mesh.num_devices, 'device')}{kind}")


def _step(plan: Plan) -> str:
    request = plan.request
    microbatches = "" if request.microbatches == 1 else f", in {request.microbatches} microbatches"
    tokens = several(request.batch * request.length, "token")
    return f"{several(request.batch, 'row')} of {several(request.length, 'token')} = {tokens}{microbatches}"


def _computation(plan: Plan) -> str:
    request = plan.request
    return (
        f"{request.engine}, {request.dtype}; weights {request.weights_dtype}, "
        + ("" if request.gradients_dtype is None else f"gradients {request.gradients_dtype}, ")
        + ("" if request.master_dtype is None else f"master weights {request.master_dtype}, ")
        + f"moments {request.moments_dtype}; recomputed: {request.remat}"
        + ("" if request.loss_chunks == 1 else f"; loss in {request.loss_chunks} chunks")
    )


def _optimizer(plan: Plan) -> str:
    """Where it is another than AdamW with its own constants, or the weights are averaged."""
    optimizer, average = plan.request.optimizer, plan.request.average
    if optimizer == ADAMW and average is None:
        return ""
    return optimizer.text + ("" if average is None else f"; average of the weights {average!r}")


def _precision(plan: Plan) -> str:
    """The recipe, which weights it quantizes, who agrees on amaxes, and whether the layout can move what is quantized."""
    recipe = plan.request.precision
    if recipe is None:
        return ""
    if not plan.quantized:
        return f"{recipe.name}: no weight is quantized"
    components = ", ".join(dict.fromkeys(weight.component for weight in plan.quantized))
    operands = [operand for weight in plan.quantized for operand in weight.operands]
    over = plan.mesh.in_mesh_order(axis for operand in operands for axis in operand.reduced)
    bound = sum(not operand.freedom.free for operand in operands)
    free = (
        "free of the layout" if not bound else f"{bound} of {several(len(operands), 'operand')} not free of the layout"
    )
    rests = ", at rest too" if recipe.rest_quantized else ""
    return (
        f"{recipe.name}: {several(len(plan.quantized), 'weight')} of {components}{rests}; "
        f"amaxes {'reduced over ' + ', '.join(over) if over else 'reduced over no axis'}; {free}"
    )


def _movement(plan: Plan) -> str:
    """How keys and values are exchanged in attention and tokens in MoE layers, where an axis shards them."""
    layout, mesh = plan.request.layout, plan.mesh
    parts = []
    if mesh.larger_than_one(layout.axes_sharding("length", "attention")):
        balanced = ", rows head to tail" if not plan.rows_in_order else ""
        parts.append(f"attention {layout.move_attention}{balanced}")
    if mesh.larger_than_one(layout.axes_with("expert", "moe")) and "moe" in plan.request.table.components:
        parts.append(f"moe {layout.move_moe}")
    return ", ".join(parts)


def _groups(plan: Plan, colors: AxisColors) -> Text:
    named = (("dp", plan.dp), ("cp", plan.cp), ("loss", plan.loss_axes))
    return Text("   ").join([Text.assemble(f"{name} ", colors.axes(axes) if axes else "-") for name, axes in named])
