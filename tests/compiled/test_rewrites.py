"""Every rewrite of the list: a difference that it explains, and one nearby that it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import pytest

from shardwright.compiled.agreement.agreement import Agreement, agree
from shardwright.compiled.agreement.matching import total
from shardwright.compiled.agreement.rewrites import FAMILIES, REWRITES, TORCH, family
from shardwright.compiled.reading.program import CompiledCollective, CompiledProgram
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.resolve import traffic_of
from shardwright.cost.hardware.chips import chips
from tests.compiled.programs import as_planned, changed, where, with_more
from tests.cost.plans import plan_of
from tests.golden import findings_case
from tests.laws.test_tables_in_docs import rows_of

Program = Callable[[Plan, str], CompiledProgram]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``explained``: a program that differs from its plan only by the rewrite. ``not_explained``: one close to that."""

    rewrite: str
    explained: Program
    not_explained: Program
    target: str = "v5p:2x2x2"
    model: str = "llama3-test"
    layout: str = "fsdp"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        case = findings_case.Case(
            name="",
            model=self.model,
            layout=self.layout,
            neighbour={},
            options={"devices": 8, "batch": 16, **self.options},
        )
        return resolve(findings_case.request(case))


def scaled(factor: float, **wanted: Any) -> Program:
    """Some collectives with their bytes multiplied."""

    def program(plan: Plan, target: str) -> CompiledProgram:
        def larger(one: CompiledCollective) -> CompiledCollective:
            return replace(one, bytes_per_device=round(factor * one.bytes_per_device))

        return changed(as_planned(plan, target), where(wanted, larger))

    return program


def counted(times: Callable[[CompiledCollective], int], **wanted: Any) -> Program:
    """Some collectives with another number of executions."""

    def program(plan: Plan, target: str) -> CompiledProgram:
        return changed(as_planned(plan, target), where(wanted, lambda one: replace(one, count_per_step=times(one))))

    return program


def as_kind(factor: float, into: str, stands_for: str | None = None, **wanted: Any) -> Program:
    """Some collectives replaced by another kind, with their bytes multiplied."""

    def program(plan: Plan, target: str) -> CompiledProgram:
        def other(one: CompiledCollective) -> CompiledCollective:
            size = round(factor * one.bytes_per_device)
            return replace(one, kind=into, bytes_per_device=size, stands_for=stands_for)

        return changed(as_planned(plan, target), where(wanted, other))

    return program


def padded(padding: int, reported: int) -> Program:
    """Reduce-scatters of one component with ``padding`` more bytes, of which the program reports some as padding."""

    def program(plan: Plan, target: str) -> CompiledProgram:
        def larger(one: CompiledCollective) -> CompiledCollective:
            return replace(one, bytes_per_device=one.bytes_per_device + padding, padding_bytes=reported)

        wanted = {"component": "mlp", "kind": "reduce-scatter"}
        return changed(as_planned(plan, target), where(wanted, larger))

    return program


def with_one(kind: str, size: int, dtype: str, axes: tuple[str, ...] = ("fsdp",), **fields: Any) -> Program:
    """A collective that the plan does not have."""

    def program(plan: Plan, target: str) -> CompiledProgram:
        one = CompiledCollective(
            kind=kind, axes=axes, bytes_per_device=size, count_per_step=1, dtypes=(dtype,), **fields
        )
        return with_more(as_planned(plan, target), [one])

    return program


def nameless(factor: float) -> Program:
    """Gradients of two components as one collective without a name."""

    def program(plan: Plan, target: str) -> CompiledProgram:
        found = [one for one in as_planned(plan, target).collectives if one.kind == "all-reduce"]
        one = replace(found[0], component=None, bytes_per_device=round(factor * total(found)), count_per_step=1)
        return with_more(changed(as_planned(plan, target), where({"kind": "all-reduce"}, lambda _: None)), [one])

    return program


def in_tiles(tile_bytes: int) -> Program:
    """Each row that is sent to an expert takes whole tiles."""

    def program(plan: Plan, target: str) -> CompiledProgram:
        def larger(one: CompiledCollective) -> CompiledCollective:
            unit = tile_bytes * traffic_of(plan.request, plan.mesh).assignments
            return replace(one, bytes_per_device=unit * ceil(one.bytes_per_device / unit))

        return changed(as_planned(plan, target), where({"kind": "all-to-all"}, larger))

    return program


def in_chunks(factor: int) -> Program:
    return scaled(factor, kind="all-to-all")


def unread(plan: Plan, target: str) -> CompiledProgram:
    """Positions that nothing reads."""

    def once(one: CompiledCollective) -> CompiledCollective | None:
        return None if one.dtypes == ("int32",) else one

    return changed(as_planned(plan, target), once)


def unread_keys(plan: Plan, target: str) -> CompiledProgram:
    """Keys that no device sends."""
    wanted = {"component": "attention", "kind": "all-to-all", "phase": "forward"}
    return changed(as_planned(plan, target), where(wanted, lambda _: None))


BF16 = {"dtype": "bfloat16"}
WIDE = {"component": "mlp", "kind": "all-gather"}
SCATTERS = {"component": "mlp", "kind": "reduce-scatter"}
# 16 rows of 128 tokens over fsdp 4: what a device sums over a sharded vocabulary, one number per token.
SUM = 16 // 4 * 128 * 4
ULYSSES = "name: mine\nmesh: {fsdp: 2, context: 4}\nroles: {fsdp: fsdp, context: context}\nmove: {attention: ulysses}\n"

CASES = (
    Case(rewrite="merged", layout="ddp", explained=nameless(1), not_explained=nameless(1.1)),
    Case(
        rewrite="room for all",
        model="mixtral-test",
        layout="ep",
        # Four devices, each of which may send all its assignments to one.
        explained=scaled(4, kind="all-to-all"),
        not_explained=scaled(3, kind="all-to-all"),
    ),
    Case(
        rewrite="rows in tiles",
        model="mixtral-test",
        layout="ep",
        options={"dtype": "bfloat16", "precision": replace(preset("fp8-row"), dispatch_quantized=True)},
        explained=in_tiles(512),
        not_explained=in_tiles(256),
    ),
    Case(
        rewrite="wider on CPU",
        target="cpu:8",
        options=BF16,
        explained=scaled(2, kind="all-gather"),
        # That backend sends no narrow dtype.
        not_explained=scaled(1, kind="all-gather"),
    ),
    Case(
        rewrite="chunks",
        target="cpu:8",
        model="mixtral-test",
        layout="ep",
        explained=in_chunks(4),
        not_explained=in_chunks(1),
    ),
    Case(
        rewrite="gathered once",
        options={"microbatches": 2},
        explained=counted(lambda one: one.count_per_step // 2, component="logits", kind="all-gather"),
        not_explained=counted(lambda one: one.count_per_step // 2, **WIDE),
    ),
    Case(
        rewrite="kept from forward",
        target="cpu:8",
        model="llama3-test num_layers=1",
        explained=counted(lambda _: 0, phase="recompute", kind="all-gather"),
        # The forward gather remains.
        not_explained=counted(lambda _: 0, **WIDE),
    ),
    Case(
        rewrite="kept from forward",
        target="cpu:8",
        model="llama3-test num_layers=1",
        options={"precision": preset("fp8-row"), "mesh_sizes": {"fsdp": 2, "tensor": 4}},
        layout="fsdp-tp",
        explained=counted(lambda _: 0, phase="recompute", kind="all-gather", component="mlp"),
        # Sums and amaxes of the recomputation are not those of the forward pass.
        not_explained=counted(lambda _: 0, phase="recompute", kind="all-reduce"),
    ),
    Case(
        rewrite="kept from forward",
        target="cpu:8",
        model="llama3-test num_layers=1",
        layout=ULYSSES,
        options={"remat": "dots"},
        explained=counted(lambda _: 0, phase="recompute", kind="all-to-all"),
        not_explained=counted(lambda _: 0, kind="all-to-all"),
    ),
    Case(rewrite="read once", layout=ULYSSES, explained=unread, not_explained=unread_keys),
    Case(rewrite="padded", explained=padded(98304, 98304), not_explained=padded(98304, 64)),
    Case(
        rewrite="windowed products",
        target="v6e:2x4",
        explained=as_kind(9 / 8, "permute", "all-gather", **WIDE),
        not_explained=as_kind(9 / 8 + 0.1, "permute", "all-gather", **WIDE),
    ),
    Case(
        rewrite="windowed products",
        target="v6e:2x4",
        explained=as_kind(7 / 8, "permute", "reduce-scatter", **SCATTERS),
        # Permutes of the source program stand for no other kind.
        not_explained=as_kind(7 / 8, "permute", None, **SCATTERS),
    ),
    Case(
        rewrite="sum of parts",
        target="v5e:2x4",
        explained=as_kind(1, "all-reduce", "all-gather", **WIDE),
        not_explained=as_kind(1, "all-reduce", None, **WIDE),
    ),
    Case(
        rewrite="all-reduce and slice",
        target="cpu:8",
        explained=as_kind(1, "all-reduce", "reduce-scatter", **SCATTERS),
        not_explained=as_kind(2, "all-reduce", "reduce-scatter", **SCATTERS),
    ),
    Case(
        rewrite="single numbers",
        explained=with_one("all-reduce", 4 * 12, "float32"),
        not_explained=with_one("all-reduce", 4096, "float32"),
    ),
    Case(
        rewrite="counts",
        explained=with_one("all-gather", 4096, "int32"),
        not_explained=with_one("permute", 4096, "int32"),
    ),
    Case(
        rewrite="counts of rows",
        target="torch:fake x 8",
        explained=with_one("all-to-all", 4096, "int64"),
        not_explained=with_one("all-to-all", 4096, "float32"),
    ),
    Case(
        rewrite="sums over the vocabulary",
        layout="fsdp-tp",
        explained=with_one("all-reduce", 2 * SUM, "float32", ("tensor",), component="logits"),
        not_explained=with_one("all-reduce", 4 * SUM, "float32", ("tensor",), component="logits"),
    ),
    Case(
        rewrite="repairs",
        explained=with_one("permute", 4096, "float32", component="residual", stands_for="reduce-scatter"),
        not_explained=with_one("permute", 1 << 24, "float32", component="mlp", stands_for="reduce-scatter"),
    ),
)


def of(case: Case, program: Program) -> Agreement:
    return agree(case.plan, program(case.plan, case.target))


def ids(case: Case) -> str:
    return case.rewrite


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_what_it_explains(case):
    agreement = of(case, case.explained)
    assert not agreement.of_state("unmatched")
    rows = [row for row in agreement.rows if row.explained_by]
    assert {name for row in rows for name in row.explained_by} == {case.rewrite}
    kept = REWRITES[case.rewrite].keeps
    assert {row.state for row in rows} == {"matched" if kept else "explained"}
    assert agreement.bytes_error == pytest.approx(0, abs=1e-6)
    assert (agreement.explained_share > 0) != kept


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_what_it_does_not_explain(case):
    assert of(case, case.not_explained).of_state("unmatched")


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_it_applies_only_on_its_targets(case):
    rewrite = REWRITES[case.rewrite]
    others = [kind for kind in ("cpu", *chips()) if not rewrite.holds_for(f"{kind}:8")]
    assert rewrite.holds_for(case.target)
    for kind in others:
        agreement = agree(case.plan, case.explained(case.plan, f"{kind}:8"))
        assert not any(case.rewrite in row.explained_by for row in agreement.rows)
        # The same bytes may be those of another target's rewrite.
        assert agreement.of_state("unmatched") or case.rewrite in ("room for all", "chunks")


def test_every_rewrite_has_a_case_and_two_may_meet():
    assert {case.rewrite for case in CASES} == set(REWRITES)
    plan = plan_of("mixtral-test", "ep", devices=8, batch=16, dtype="bfloat16")
    program = changed(
        as_planned(plan, "cpu:8"),
        lambda one: replace(
            one,
            bytes_per_device=one.bytes_per_device * (2 if "bfloat16" in one.dtypes else 1) * (4 if one.ragged else 1),
        ),
    )
    agreement = agree(plan, program)
    assert not agreement.of_state("unmatched")
    assert ("wider on CPU", "chunks") in {row.explained_by for row in agreement.rows}


@pytest.mark.parametrize(("share", "state"), [(1.0, "explained"), (2.0, "unmatched")])
def test_a_row_may_be_partly_padded_and_partly_replaced(share: float, state: str):
    """``share``: the bytes of the replacement, relative to a third of the row."""
    plan = plan_of("llama3-test", "fsdp", devices=8, batch=16)
    ours = {"component": "mlp", "kind": "reduce-scatter"}
    program = as_planned(plan, "v5p:2x2x2")
    (scatter,) = [one for one in program.collectives if (one.component, one.kind) == tuple(ours.values())]
    third, padding = scatter.count_per_step // 3, scatter.bytes_per_device // 10
    assert 3 * third == scatter.count_per_step
    kept = replace(
        scatter,
        count_per_step=2 * third,
        bytes_per_device=scatter.bytes_per_device + padding,
        padding_bytes=padding,
    )
    summed = replace(
        scatter,
        kind="all-reduce",
        count_per_step=third,
        bytes_per_device=round(share * scatter.bytes_per_device),
        stands_for="reduce-scatter",
    )
    agreement = agree(plan, with_more(changed(program, where(ours, lambda _: None)), [kept, summed]))
    assert {row.state for row in agreement.rows if row.component == "mlp" and row.kind == "reduce-scatter"} == {state}
    if state == "explained":
        (row,) = agreement.of_state("explained")
        assert row.explained_by == ("all-reduce and slice", "padded")
        assert row.compiled_bytes == total([kept, summed])


def test_names_of_targets():
    known = {"cpu", *chips(), *FAMILIES, TORCH}
    for rewrite in REWRITES.values():
        assert set(rewrite.targets) <= known
        assert rewrite.reason
        assert rewrite.rule
        assert bool(rewrite.ratio) != bool(rewrite.unplanned) or rewrite.name in ("merged", "padded")
    assert {family(kind) for kind in chips()} == {"tpu", "gpu"}


def test_the_table_in_the_docs():
    shown = rows_of("agreement.md", "| rewrite | targets | of the plan | in the program | bytes | why |")
    assert shown == [
        [
            rewrite.name,
            ", ".join(rewrite.targets),
            ", ".join(rewrite.planned) or "nothing",
            ", ".join(rewrite.compiled) or "the same",
            rewrite.rule,
            rewrite.reason,
        ]
        for rewrite in REWRITES.values()
    ]
