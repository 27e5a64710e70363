"""The view of a plan: the answer first, then what was planned, the findings, and its sections."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.layout.auto import LAYOUT
from shardwright.core.plan.plan import Plan
from shardwright.report.plan.answer_view import answer_view
from shardwright.report.plan.choices_view import choices_table
from shardwright.report.plan.collectives_view import collectives_table
from shardwright.report.plan.findings_view import findings_list
from shardwright.report.plan.head import head, title
from shardwright.report.plan.memory_view import memory_table
from shardwright.report.plan.pipeline_view import pipeline_table
from shardwright.report.plan.roles_view import roles_table
from shardwright.report.plan.tensor_tables import activations_table, of_integers, weights_table
from shardwright.report.text.columns import paragraph, section
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, pretty_seconds

SECTIONS = ("roles", "weights", "activations", "collectives", "stages", "memory", "step", "choices")
"""The sections of a plan, in the order in which they are shown."""

OF_TENSORS = {"weights", "activations", "collectives"}
"""Those with specs or axes of tensors."""

SHOWN = ("roles", "stages", "memory")
"""Those that are shown where nothing else is asked for."""


def plan_view(plan: Plan, chosen: Mapping[str, str], *, shows: Collection[str] = SHOWN) -> View:
    """Draws a plan: the answer, what is planned, the findings, then the sections in ``shows``. ``chosen``: the defaults that were used, by option."""

    def view(width: int) -> RenderableType:
        colors = AxisColors.of(plan.mesh.shape)
        parts = [title(plan), answer_view(plan, plan.findings, width), Text(""), head(plan, colors, chosen, width)]
        if plan.findings:
            parts += [Text("findings\n", style="bold"), findings_list(plan.findings, width), Text("")]
        shown = [name for name in _sections_of(plan) if name in shows]
        for name in shown:
            if colors.left_out and name in OF_TENSORS and OF_TENSORS.isdisjoint(shown[: shown.index(name)]):
                parts.append(Text(f"Axes of size 1 are left out below: {', '.join(colors.left_out)}.\n", style="dim"))
            parts.append(_section(name, plan, colors, width))
        left_out = [name for name in _sections_of(plan) if name not in shows]
        more = (
            []
            if not left_out
            else [Text(f"Not shown: {', '.join(left_out)} (--show {left_out[0]}, or --full).", style="dim")]
        )
        return Group(*parts, *more)

    return view


def _sections_of(plan: Plan) -> Sequence[str]:
    """The sections that this plan has."""
    lacks = {
        "stages": plan.pipeline is None,
        "step": plan.step is None,
        "choices": all(choice.what == LAYOUT for choice in plan.choices),
    }
    return [name for name in SECTIONS if not lacks.get(name, False)]


def _section(name: str, plan: Plan, colors: AxisColors, width: int) -> RenderableType:
    match name:
        case "roles":
            return section("roles", roles_table(plan, colors, width))
        case "weights":
            return section("weights, per layer and device", weights_table(plan, colors, width))
        case "activations":
            table = activations_table(plan, colors, width)
            return section("activations, per layer and device", table, *_integers(plan))
        case "collectives":
            title = f"collectives of one step, per device{_slowest(plan)}"
            return section(title, collectives_table(plan, colors, width))
        case "stages":
            assert plan.pipeline is not None
            return section("stages of the pipeline", pipeline_table(plan.pipeline, width))
        case "memory":
            return section(f"memory of one device{_of_rank(plan)}", memory_table(plan, width))
        case "step":
            return section("one step, estimated", paragraph(_step(plan)), *map(paragraph, _sources(plan)))
        case _:
            return section("chosen by cost", choices_table(plan.choices, width))


def _of_rank(plan: Plan) -> str:
    return "" if plan.pipeline is None else f" of rank {plan.pipeline.fullest}, which needs the most"


def _slowest(plan: Plan) -> str:
    return "" if plan.pipeline is None else f" of rank {plan.pipeline.slowest}, which has the most work"


def _integers(plan: Plan) -> Sequence[Text]:
    """A line about the activations that the table leaves out."""
    rows = of_integers(plan)
    if not rows:
        return ()
    total = pretty_bytes(sum(row.bytes_per_device for row in rows))
    return (
        Text(f"\nLeft out: {len(rows)} of integers, {total} together ({rows[0].name} ...); --json has them.", "dim"),
    )


def _step(plan: Plan) -> str:
    assert plan.step is not None
    step = plan.step
    text = f"{pretty_seconds(step.seconds)}: "
    if step.seconds_if_one_device_gets_all is not None:
        longest = pretty_seconds(step.seconds_if_one_device_gets_all)
        text = f"even routing {pretty_seconds(step.seconds)}, if one device gets all {longest}; with even routing "
    text += (
        f"computing {pretty_seconds(step.compute_seconds)}, "
        f"communicating {pretty_seconds(step.communication_seconds)}, "
        f"of which {pretty_seconds(step.exposed_seconds)} is not hidden"
    )
    if step.host_seconds is None:
        text += f", and without copies to the host and back: the link of a {_chip(plan)} has no figure here"
    elif step.host_seconds:
        text += f", copying to the host and back {pretty_seconds(step.host_seconds)}, "
        text += f"of which {pretty_seconds(step.host_exposed_seconds)} is not hidden"
    if step.idle_seconds:
        text += f", stages waiting {pretty_seconds(step.idle_seconds)}"
    if step.low_seconds is not None and step.high_seconds is not None:
        low, high = pretty_seconds(step.low_seconds), pretty_seconds(step.high_seconds)
        text += "" if low == high else f"; nine of ten such steps would take {low} to {high}"
    return text


def _chip(plan: Plan) -> str:
    return plan.request.chip.name if plan.request.chip is not None else "device"


def _sources(plan: Plan) -> list[str]:
    """What the times are made of, and the constants on which sources disagree, with the values that were used."""
    assert plan.step is not None
    if not plan.step.constants:
        return []
    shares = [constant for constant in plan.step.constants if constant.name == "kernels_share"]
    share = f", of which a step reaches {shares[0].value:.0%} ({shares[0].source})" if shares else ""
    lines = [f"at the rates that kernels were measured at{share}; on your own chips: shardwright calibrate"]
    for constant in plan.step.constants:
        others = ", ".join(f"{value:.4g} ({source})" for value, source in constant.others)
        if others:
            lines.append(f"{constant.name} {constant.value:.4g} ({constant.source}); also {others}")
    return lines
