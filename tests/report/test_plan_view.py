"""A plan on a terminal: lines fit, columns line up, nothing is left out, and colours appear only on a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Collection
from dataclasses import replace
from functools import cache

import pytest

from shardwright import Chip, Plan
from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.planning import make_plan
from shardwright.report.plan.plan_view import SECTIONS, SHOWN, plan_view
from shardwright.report.review.difference_view import difference_view
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.terminal import to_text
from tests.golden.layouts_matrix import cases, make, request

ANSI = re.compile(r"\x1b\[[0-9;]*m")
WIDTHS = (80, 100, 130, 200)
CASES = list(cases())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@cache
def plan_of(preset: str, model: str) -> Plan:
    return make(preset, model)


def drawn(plan: Plan, width: int = 100, shows: Collection[str] = SECTIONS) -> str:
    return to_text(plan_view(plan, {"--batch": "8"}, shows=shows), io.StringIO(), width=width)


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_every_line_fits(preset, model):
    for width in (80, 130):
        for line in drawn(plan_of(preset, model), width).splitlines():
            assert len(line) <= width, line
            assert line == line.rstrip(), line


@pytest.mark.parametrize("width", WIDTHS)
def test_every_tensor_is_there_with_its_specs(width):
    plan = plan_of("ep-as-cp", "deepseek3-test")
    text = " ".join(drawn(plan, width).split())
    integers = [tensor for tensor in plan.tensors if tensor.dtype in ("int32", "bool")]
    assert f"Left out: {len(integers)} of integers, " in text
    for tensor in plan.tensors:
        if tensor in integers:
            continue
        # The heading says how many layers have a row, or the row itself.
        name, shape = tensor.name.rpartition(".")[2], "x".join(map(str, tensor.shape))
        assert re.search(rf" {name}( x{tensor.num})? {shape} ", text), tensor.name
    assert " q_up 32x4x192 q_lora/fsdp/expert heads head_dim " in text
    assert "-> q_lora heads head_dim " in text
    # The axis of size 1 is named once and left out of the specs.
    assert "Axes of size 1 are left out below: data." in text
    findings, tables = text.split(" roles ", maxsplit=1)
    assert "batch/data" not in tables
    assert "batch/data" in findings, "a finding has the notation whole"


def test_bytes_stand_right_aligned_in_one_column():
    lines = drawn(plan_of("ep-as-cp", "deepseek3-test"), 160).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("activations,"))
    header, *rows = lines[start + 1 : lines.index("", start)]
    ends = {len(line) for line in rows if line.startswith("    ")}
    assert ends == {len(header)}


def test_roles_are_transposed_where_the_components_do_not_fit():
    plan = plan_of("tp", "deepseek3-test")
    wide, narrow = drawn(plan, 120).splitlines(), drawn(plan, 80).splitlines()
    assert "  tensor 8  idle   tensor     tensor    tensor     tensor  idle    tensor  tensor" in wide
    assert "  attention  data    tensor" in narrow
    assert "  router     data    idle" in narrow


def test_the_head_has_everything_a_plan_depends_on():
    plan = plan_of("ep-as-cp", "deepseek3-test")
    assert drawn(plan, 120).splitlines()[:12] == [
        "deepseek3-test under ep-as-cp",
        "  memory    25.6 MiB a device; with --chips also whether it fits, and how long a step takes",
        "  findings  3 warnings, 3 info",
        "",
        "  layout       Outside the experts the expert axis shards the sequence; inside, it shards the experts.",
        "  model        3,620,160 parameters (3.62 M), 4 layers",
        "  mesh         data 1 x fsdp 2 x expert 4 = 8 devices",
        "  step         8 rows of 128 tokens = 1,024 tokens",
        "  computation  jax, float32; weights float32, moments float32; recomputed: full",
        "  movement     attention gather, moe all-to-all",
        "  groups       dp data/fsdp   cp expert   loss data/fsdp/expert",
        "  by default   --batch 8",
    ]


def test_memory_is_exact_and_adds_up():
    plan = plan_of("hsdp", "llama3-test")
    lines = drawn(plan).splitlines()
    start = lines.index("memory of one device")
    shown = {line.split("  ")[1]: line for line in lines[start + 2 : start + 7]}
    total = plan.memory.total_bytes_per_device
    assert f"{total:,}" in shown["total"]
    assert f"{plan.memory.weights_bytes:,}" in shown["weights"]
    assert shown["total"].count("#") == 30


def test_a_bar_never_wraps():
    text = drawn(plan_of("fsdp-tp", "llama3-405b"), 80)
    lines = text[text.index("memory of one device") :].split("\n\n")[0].splitlines()
    assert len(lines) == 2 + 6
    assert lines[-2].count("#") == 80 - lines[-2].index("#")


def test_with_chips_a_full_bar_is_the_usable_memory():
    chip = Chip(name="C", usable_bytes=2 * plan_of("hsdp", "llama3-test").memory.total_bytes_per_device, source="s")
    plan = make_plan(replace(request("hsdp", "llama3-test"), chip=chip))
    lines = drawn(plan).splitlines()
    total = next(line for line in lines if line.startswith("  total"))
    limit = next(line for line in lines if line.startswith("  C has"))
    assert total.count("#") == 15
    assert limit.endswith("the total is 50.0% of it")
    assert "= 8 devices, C" in drawn(plan)


def test_collectives_add_up():
    plan = plan_of("ep", "deepseek3-test")
    number = sum(one.count_per_step for one in plan.collectives)
    (line,) = [line for line in drawn(plan).splitlines() if "collectives of" in line and "together" in line]
    assert line.startswith(f"  {number} collectives of ")
    start = drawn(plan).index("collectives of one step")
    table = drawn(plan)[start:].split("\n\n")[0]
    # phase, kind, axes, largest and its unit, times, bytes and their unit
    rows = re.findall(r"^    \w+ +[a-z-]+ +\S+ +[\d.]+ \w+ +([\d,]+) +[\d.]+ \w+$", table, re.MULTILINE)
    assert sum(int(times.replace(",", "")) for times in rows) == number


def test_a_layout_on_one_device_has_no_collectives():
    plan = make_plan(replace(request("ddp", "llama3-test"), devices=1))
    assert "  none: the step has no collectives\n" in drawn(plan)


def test_choices_and_times_are_shown_when_there_are_any():
    unchosen = request("ep", "deepseek3-test")
    plan = make_plan(replace(unchosen, layout=replace(unchosen.layout, move_moe="auto")))
    (choice,) = plan.choices
    table = drawn(plan, 160).split("chosen by cost\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table] == [
        "option",
        "move.moe",
        *sorted(choice.wire_bytes, key=choice.wire_bytes.get),
    ]
    assert [line.split()[0] for line in table if line.endswith("  chosen")] == [choice.chosen]
    assert "time" not in table[0]
    seconds = {option: 0.1 * (number + 1) for number, option in enumerate(reversed(choice.wire_bytes))}
    priced = drawn(replace(plan, choices=(replace(choice, seconds=seconds),)), 160).split("chosen by cost\n")[1]
    assert [line.split()[:3] for line in priced.splitlines()[2 : 2 + len(seconds)]] == [
        [option, f"{time * 1e3:.0f}", "ms"] for option, time in seconds.items()
    ]
    step = StepCost(seconds=0.5, compute_seconds=0.4, communication_seconds=0.2, exposed_seconds=0.1)
    timed = replace(plan, step=step, collectives=tuple(replace(one, seconds=0.001) for one in plan.collectives))
    assert "  500 ms: computing 400 ms, communicating 200 ms, of which 100 ms is not hidden\n" in drawn(timed, 160)
    assert "  all time\n" in drawn(timed, 160)
    other = replace(timed, step=replace(step, idle_seconds=0.05, low_seconds=0.4, high_seconds=0.6))
    ended = "not hidden, stages waiting 50.0 ms; nine of ten such steps would take 400 ms to 600 ms\n"
    assert ended in drawn(other, 200)
    assert max(len(line) for line in drawn(other, 80).splitlines()) <= 80


def test_before_a_run_the_tables_of_tensors_are_left_out():
    text = drawn(plan_of("fsdp", "llama3-test"), shows=SHOWN)
    assert "weights, per layer" not in text
    assert "memory of one device" in text
    assert "\nfindings\n" in text
    assert text.endswith("Not shown: weights, activations, collectives (--show weights, or --full).\n")


def test_piped_there_are_no_colours():
    assert "\x1b" not in drawn(plan_of("ep", "deepseek3-test"))


def test_on_a_terminal_each_axis_has_one_colour_everywhere():
    view = plan_view(plan_of("ep", "deepseek3-test"), {}, shows=SECTIONS)
    text = to_text(view, Terminal(), width=160)
    assert ANSI.sub("", text).splitlines()[0] == "deepseek3-test under ep"
    # Above, an axis may have the role of another's name.
    specs = text[text.index("weights, per layer") : text.index("memory of one device")]
    colours = {axis: set(re.findall(rf"\x1b\[([0-9;]*)m{axis}\b", specs)) for axis in ("fsdp", "expert")}
    assert {axis: len(found) for axis, found in colours.items()} == {"fsdp": 1, "expert": 1}
    assert colours["fsdp"] != colours["expert"]


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = to_text(plan_view(plan_of("ep", "deepseek3-test"), {}), Terminal(), width=160)
    # Weight of type remains; no colour does (30 to 37, 90 to 97).
    codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", text) for code in found.split(";")}
    assert codes <= {"", "0", "1", "2"}


def test_columns_of_the_environment_give_the_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    lines = to_text(plan_view(plan_of("fsdp", "llama3-test"), {}), io.StringIO()).splitlines()
    assert max(len(line) for line in lines) <= 70


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_a_terminal_of_few_columns_gets_every_line_too(columns, monkeypatch):
    view = plan_view(plan_of("fsdp", "llama3-test"), {})
    monkeypatch.setenv("COLUMNS", columns)
    assert to_text(view, io.StringIO()) == to_text(view, io.StringIO(), width=60)


def test_axes_of_size_one_shard_nothing_and_are_not_shown():
    colors = AxisColors.of({"data": 1, "fsdp": 2})
    assert colors.left_out == ("data",)
    assert colors.spec("batch/data/fsdp length/data embed").plain == "batch/fsdp length embed"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_difference_fits_too(width):
    from shardwright.locks.difference import difference

    pairs = [("ep", "ep-as-cp"), ("fsdp", "tp"), ("ddp", "pp"), ("hsdp", "shard-exp-on-fsdp")]
    for before, after in pairs:
        found = difference(*(plan_of(preset, "deepseek3-test").to_json() for preset in (before, after)))
        for line in to_text(difference_view(found), io.StringIO(), width=width).splitlines():
            assert len(line) <= width, line
