"""The break-even between moving tokens and moving expert weights, checked against the plans of each option."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cost.test_step import priced

MIXTRAL = {"mesh_sizes": {"expert": 8}, "length": 2048, "dtype": "bfloat16", "weights_dtype": "bfloat16"}


def sent(plan) -> float:
    """Bytes that one device sends for one layer's experts over the expert axes, summed over the plan's collectives."""
    total = 0.0
    axis = ("expert",)
    for one in plan.collectives:
        if one.axes == axis and one.component == "moe":
            floats = plan.by_name[one.tensors[0]].dtype != "int32"
            devices = one.subgroup.size if one.subgroup else 8
            share = 1 - 1 / devices if one.kind in ("all-to-all", "all-gather", "reduce-scatter") else 0
            total += floats * share * one.bytes_per_device * one.count_per_step
    return total / plan.request.table.num_layers


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("move", ["all-to-all", "ring", "weights"])
def test_the_wire_bytes_of_an_option_are_those_of_its_plan(move: str, remat: str) -> None:
    auto = priced("mixtral-8x7b", "ep", "v5p:2x2x2", batch=8, move_moe="auto", remat=remat, **MIXTRAL)
    choice = auto.choices[0]
    plan = priced("mixtral-8x7b", "ep", "v5p:2x2x2", batch=8, move_moe=move, remat=remat, **MIXTRAL)
    # In addition to tokens a ring sends their routing weights, two numbers for 4,096.
    assert sent(plan) == pytest.approx(choice.wire_bytes[move], rel=2e-3)


@pytest.mark.parametrize(("rows", "chosen"), [(104, "all-to-all"), (120, "weights")])
def test_mixtral_has_a_break_even_on_eight_chips(rows: int, chosen: str) -> None:
    """At 28,672 tokens a chip: the time of an exchange grows with the tokens, that of weights does not."""
    plan = priced("mixtral-8x7b", "ep", "v5p:2x2x2", batch=rows, move_moe="auto", **MIXTRAL)
    choice = plan.choices[0]
    assert choice.chosen == plan.request.layout.move_moe == chosen
    even = rows * 2048 / 8 * choice.seconds["weights"] / choice.seconds["all-to-all"]
    assert even == pytest.approx(28_672, rel=1e-6)


def test_deepseek_sends_tokens_around_a_ring() -> None:
    """A token is routed to 8 of 256 experts: the weights of one layer are a hundred times as large as the tokens."""
    options = {**MIXTRAL, "mesh_sizes": {"fsdp": 16, "expert": 8}, "length": 4096}
    plan = priced("deepseek3-671b", "ep", "v5p:4x4x8", batch=128, move_moe="auto", **options)
    choice = plan.choices[0]
    assert choice.chosen == "ring"
    assert choice.seconds["weights"] > 10 * choice.seconds["ring"]


PAGE = Path(__file__).parent.parent.parent / "docs" / "cost.md"
SHOWN = [
    ("mixtral-8x7b", "v5p:2x2x2", {"expert": 8}, 8, 2048),
    ("mixtral-8x7b", "v5p:2x2x2", {"expert": 8}, 120, 2048),
    ("mixtral-8x7b", "h100:1x8", {"expert": 8}, 8, 2048),
    ("deepseek3-671b", "v5p:4x4x8", {"fsdp": 16, "expert": 8}, 128, 4096),
    ("deepseek3-671b", "h100:16x8", {"fsdp": 16, "expert": 8}, 128, 4096),
]


@pytest.mark.parametrize(("model", "chips", "mesh", "rows", "length"), SHOWN)
def test_the_table_of_the_page(model: str, chips: str, mesh: dict[str, int], rows: int, length: int) -> None:
    options = {**MIXTRAL, "mesh_sizes": mesh, "length": length}
    plan = priced(model, "ep", chips, batch=rows, move_moe="auto", **options)
    choice = plan.choices[0]
    seconds, devices = choice.seconds, plan.mesh.num_devices
    tokens = rows * length // devices
    even = tokens * seconds["weights"] / min(seconds["all-to-all"], seconds["ring"])
    times = " | ".join(f"{seconds[move] * 1e3:.3g} ms" for move in ("all-to-all", "ring", "weights"))
    line = (
        f"| {model}, {devices} {chips.partition(':')[0]}, {mesh['expert']} | {tokens:,} | {times} | {choice.chosen} | "
    )
    assert f"{line}{even:,.0f} tokens a chip |" in PAGE.read_text(encoding="utf-8").splitlines()
