"""The answer of a plan, before all else: does it fit, how long is a step, how fast is the training, what does it cost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.estimate.answer import Speed, Training
from shardwright.core.findings.codes import NO_NUMBER, NO_ROWS
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import every, percent
from shardwright.core.plan.plan import Plan
from shardwright.report.plan.findings_view import counted
from shardwright.report.text.columns import labelled
from shardwright.report.text.units import pretty_bytes, pretty_seconds, rounded, short_count

FITS, DOES_NOT_FIT = "green", "red"


def answer_view(plan: Plan, findings: Sequence[Finding], width: int) -> RenderableType:
    """At most eight lines where they have room, the number of ``findings`` among them."""
    answer = plan.answer
    lines: list[tuple[str, Text | str]] = [("memory", _memory(plan))]
    if answer is not None and answer.speed is not None:
        lines += speed_lines(plan, answer.speed)
        if answer.training is not None:
            lines.append((f"{short_count(answer.training.tokens)} tokens", training_text(answer.training)))
    elif answer is not None:
        lines.append(("step", _no_time(findings)))
        if plan.request.training_tokens is not None:
            lines.append((f"{short_count(plan.request.training_tokens)} tokens", "no days: a step has no time"))
    lines.append(("findings", counted(findings)))
    return labelled(lines, width)


def _no_time(findings: Sequence[Finding]) -> str:
    """Why a step has no time, by the finding that says it."""
    codes = {finding.code for finding in findings}
    if NO_ROWS in codes:
        return f"no time: devices have no row, or no token ({NO_ROWS})"
    if NO_NUMBER in codes:
        return f"no time: no source was checked for a number of this chip ({NO_NUMBER})"
    return "no time: the errors come first"


def _memory(plan: Plan) -> Text:
    needed = pretty_bytes(plan.memory.total_bytes_per_device)
    answer = plan.answer
    if answer is None or answer.usable_bytes is None:
        return Text(f"{needed} a device; with --chips also whether it fits, and how long a step takes")
    chip = "" if plan.request.chip is None else f" ({plan.request.chip.name})"
    rest = answer.usable_bytes - answer.needed_bytes
    state = Text("fits", style=FITS) if rest >= 0 else Text("does not fit", style=DOES_NOT_FIT)
    left = f"{pretty_bytes(abs(rest))} {'free' if rest >= 0 else 'too much'}"
    most = answer.needed_bytes_if_one_device_gets_all
    grown = "" if most is None else f"; {pretty_bytes(most)} if one device gets all tokens"
    return state + Text(f": {needed} of {pretty_bytes(answer.usable_bytes)}{chip}, {left}{grown}")


def speed_lines(plan: Plan, speed: Speed) -> list[tuple[str, Text | str]]:
    step = pretty_seconds(speed.seconds)
    if speed.low_seconds is not None and speed.high_seconds is not None and speed.low_seconds < speed.high_seconds:
        step += f"; nine of ten such steps would take {pretty_seconds(speed.low_seconds)} to {pretty_seconds(speed.high_seconds)}"
    if plan.step is not None and (longest := plan.step.seconds_if_one_device_gets_all) is not None:
        step += f"; if one device gets all tokens {pretty_seconds(longest)}"
    return [
        ("step", step),
        ("speed", f"{speed.tokens_per_s:,.0f} tokens/s, {speed.tokens_per_s_per_device:,.0f} a device"),
        ("MFU", _utilisation(speed)),
        ("waiting", _waiting(plan, speed)),
    ]


def _utilisation(speed: Speed) -> str:
    share = "not known: the chip has no peak" if speed.mfu is None else f"{speed.mfu:.1%}"
    text = f"{share}, {speed.model_tflops_per_s_per_device:,.0f} TFLOP/s a device of the model"
    hardware = speed.hardware_tflops_per_s_per_device
    return text if hardware is None else f"{text}, {hardware:,.0f} with what is computed again"


def _waiting(plan: Plan, speed: Speed) -> str:
    """The communication that is not hidden, and what stages wait for each other."""
    idle = 0.0 if plan.step is None else plan.step.idle_seconds
    text = f"{percent(speed.exposed_share)}{' of the step' if not idle else ''} for communication"
    if idle:
        text = f"{percent(idle / speed.seconds)} of the step for other stages, {text}"
    waiting = speed.waiting
    if waiting is None:
        return text
    over = f" over {every(waiting.axes)}" if waiting.axes else ""
    return f"{text}; the longest is the {waiting.kind}{over} of {waiting.component}, {waiting.network}"


def training_text(training: Training) -> str:
    """
    >>> training_text(Training(tokens=15 * 10**12, days=697.9, device_hours=4_287_900.0, price=2.5))
    '698 days, 4,288,000 device-hours, 10,720,000 at 2.5 an hour'
    """
    text = f"{rounded(training.days, 3)} days, {rounded(training.device_hours)} device-hours"
    return text if training.cost is None else f"{text}, {rounded(training.cost)} at {training.price:g} an hour"
