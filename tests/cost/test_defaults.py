"""A plan without layout, mesh and batch is a valid one of the machine that fits, or the nearest to it; what is typed stays."""

from __future__ import annotations

import json

import pytest

from shardwright.cli.main import main
from shardwright.core.findings.effect import Price
from shardwright.core.findings.thresholds import MEMORY_WARNING_SHARE
from shardwright.models import names
from shardwright.search import defaults
from tests.matrix import rest

CHIPS = ("h100:1x8", "h100:8x8", "h100:32x8", "v5p:4x4x8", "v6e:16x16")

COVERING = [
    ("llama3-8b", "h100:32x8"),
    ("llama3-405b", "h100:1x8"),
    ("deepseek3-671b", "h100:32x8"),
    ("mixtral-8x7b", "v6e:16x16"),
    ("llama3-test", "v5p:4x4x8"),
]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def held_to_the_law(capsys: pytest.CaptureFixture[str], model: str, chips: str) -> str:
    code, plan = printed(capsys, model, "--chips", chips)
    errors = {finding["code"] for finding in plan["findings"] if finding["severity"] == "error"}
    choice = plan["choices"][0]
    assert choice["what"] == "layout"
    assert choice["chosen"].startswith(f"--layout {plan['layout']} --mesh ")
    assert f"--batch {plan['batch']}" in choice["chosen"]
    if not code:
        assert not errors
        assert plan["step"]["seconds"] is not None
        # The same request, said in full, is the same plan.
        typed, again = printed(capsys, model, "--chips", chips, *choice["chosen"].split())
        assert (typed, again["mesh"], again["memory"], again["step"]) == (0, plan["mesh"], plan["memory"], plan["step"])
    else:
        # It misses by memory alone, and nothing else that was tried needs less.
        assert errors == {"SW312"}
    return f"{model:<16} {chips:<10} {choice['chosen']}  {'fits' if not code else 'misses'}"


@pytest.mark.parametrize(("model", "chips"), COVERING)
def test_a_plan_of_a_machine_is_valid_and_fits_or_says_by_how_much_it_misses(capsys, model, chips):
    held_to_the_law(capsys, model, chips)


@pytest.mark.parametrize(("model", "chips"), [rest(model, chips) for model in names() for chips in CHIPS])
def test_every_model_has_a_plan_on_every_machine(capsys, model, chips):
    held_to_the_law(capsys, model, chips)


def test_what_is_typed_stays(capsys):
    _, plan = printed(capsys, "llama3-8b", "--chips", "h100:32x8", "--batch", "512", "--microbatches", "2")
    assert plan["batch"] == 512
    assert "--microbatches 2" in plan["choices"][0]["chosen"]
    code, plan = printed(capsys, "llama3-8b", "--layout", "fsdp", "--chips", "h100:32x8")
    # A layout that is typed keeps its own mesh; its rows are those that all devices share.
    assert (code, plan["layout"], plan["mesh"]["fsdp"], plan["batch"] % 256) == (0, "fsdp", 256, 0)
    assert not any(choice["what"] == "layout" for choice in plan["choices"])


def test_a_step_of_which_devices_have_no_row_has_no_time(capsys):
    code, plan = printed(capsys, "llama3-8b", "--layout", "fsdp", "--batch", "64", "--chips", "h100:32x8")
    assert (code, plan["step"]) == (1, None)


@pytest.mark.parametrize(
    ("model", "chips"), [("llama3-70b", "gb200:2x72"), ("llama3-8b", "gb200:72"), ("mixtral-8x7b", "h100:96")]
)
def test_devices_that_are_no_power_of_two_shard_by_their_even_factor(capsys, model, chips):
    assert "fits" in held_to_the_law(capsys, model, chips)
    code, plan = printed(capsys, model, "--chips", chips)
    # No weight is left whole on each device, as it is where no axis divides its dims.
    assert (code, plan["layout"] != "ddp") == (0, True)


@pytest.mark.parametrize(
    "options",
    ["", "--layout fsdp", "--layout pp --mesh stage=4", "--layout fsdp-tp --mesh tensor=4"],
)
def test_microbatches_that_are_typed_all_have_rows(capsys, options):
    code, plan = printed(capsys, "llama3-8b", "--chips", "h100:64", "--microbatches", "16", *options.split())
    assert (code, plan["batch"] % (16 * 8)) == (0, 0)
    assert plan["step"]["seconds"] is not None


def test_the_next_is_valid_and_no_faster_than_what_was_chosen(capsys):
    sizes = ["num_layers=4", "embed=512", "num_heads=8", "num_kv_heads=4", "head_dim=64", "mlp=1024", "vocab=1024"]
    options = ["llama3-test", "--chips", "h100:8", "--set", *sizes]
    _, plan = printed(capsys, *options)
    choice = plan["choices"][0]
    assert choice["costs"][choice["chosen"]] <= 1.01 * min(choice["costs"].values())
    first, second = sorted(choice["costs"], key=choice["costs"].get)[:2]
    following = second if first == choice["chosen"] else first
    assert printed(capsys, *options, *following.split())[0] == 0


@pytest.mark.parametrize(("model", "chips"), [("llama3-8b", "h100:8x8"), rest("llama3-70b", "h100:32x8")])
def test_of_those_that_are_as_fast_as_the_fastest_the_smallest_is_chosen(monkeypatch, model, chips):
    """All that the choice priced, by what it returned."""
    returned = []

    def remembered(chosen, priced, limit, before=defaults._defaults):
        returned.append((chosen, list(priced), limit))
        return before(chosen, priced, limit)

    monkeypatch.setattr(defaults, "_defaults", remembered)
    main(["plan", model, "--chips", chips, "--json"])
    ((chosen, priced, limit),) = returned
    seconds = {tried.text: defaults._seconds(tried) for tried in priced}
    equals = [tried for tried in priced if seconds[tried.text] <= 1.01 * min(seconds.values())]
    assert len(priced) > 1
    assert chosen.total_bytes == min(tried.total_bytes for tried in equals if tried.total_bytes)
    # The reserve: all that is tried has a tenth of the memory left.
    assert max(tried.total_bytes for tried in priced) < MEMORY_WARNING_SHARE.value * limit


def test_equals_are_those_of_one_hundredth() -> None:
    def tried(seconds: float | None, total_bytes: int) -> defaults._Tried:
        price = None if seconds is None else Price(seconds=seconds, bytes_per_device=total_bytes, tokens=1, devices=1)
        return defaults._Tried(request=None, total_bytes=total_bytes, price=price)  # pyright: ignore[reportArgumentType]

    ordered = [tried(1.0, 9), tried(1.005, 5), tried(1.0099, 7), tried(1.011, 1), tried(1.2, 1)]
    assert defaults._fastest(ordered) == (ordered[:3], ordered[3])
    assert defaults._fastest(ordered[3:4]) == (ordered[3:4], None)
    # What has no time is as fast as nothing.
    without = [tried(None, 9), tried(None, 5)]
    assert defaults._fastest(without) == (without[:1], without[1])
    assert defaults._fastest([]) == ([], None)
