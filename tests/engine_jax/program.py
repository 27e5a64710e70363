"""What a compiled program does in one run, loops multiplied out: its collectives, and its products of matrices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from math import prod
from typing import NamedTuple

from shardwright.core.mesh import Mesh
from shardwright.core.plan import Plan
from shardwright.core.table import DTYPE_BYTES
from tests.engine_jax.compiled_text import KINDS, axes_of, replica_groups

HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
LINE = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<op>[a-z][\w\-]*)\((?P<rest>.*)$")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|calls|to_apply|called_computations=\{|branch_computations=\{)=?%?([\w.\-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1, "s64": 8, "f64": 8}
PERMUTE = "collective-permute"


class Line(NamedTuple):
    """An instruction: what it leaves (all its tensors), its name in the language of the compiler, and the rest."""

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    op: str
    rest: str


class Moved(NamedTuple):
    """One tensor of one collective. ``axes``: those along which the devices of a group differ; none for a permutation.

    ``bytes``: of its operand or result on one device, whichever is larger.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int


class Program:
    """A compiled program's text, taken apart."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Line]] = {}
        lines: list[Line] = []
        for raw in text.splitlines():
            if head := HEAD.match(raw):
                lines = self.computations.setdefault(head["name"], [])
                if head["entry"]:
                    self.entry = head["name"]
            elif found := LINE.match(raw):
                shapes = tuple((dtype, _numbers(sizes)) for dtype, sizes in SHAPE.findall(found["type"]))
                lines.append(Line(found["name"], shapes, found["op"], found["rest"]))

    def executed(self, ops: str, unknown: Fraction | None = None) -> Iterator[tuple[str, Line, Fraction]]:
        """Every instruction of these kinds with its computation and how often it runs.

        ``unknown``: the trips of a loop that does not say their number; None: a loop that has such an instruction must.
        """
        yield from self._of(self.entry, Fraction(1), ops, unknown)

    def _of(
        self, computation: str, times: Fraction, ops: str, unknown: Fraction | None
    ) -> Iterator[tuple[str, Line, Fraction]]:
        for line in self.computations[computation]:
            if re.fullmatch(ops, line.op.removesuffix("-start")):
                yield computation, line, times
            again = times
            if line.op == "while":
                trips = TRIPS.search(line.rest)
                again = times * (Fraction(trips[1]) if trips else unknown or 0)
                inside = (
                    found for called in CALLED.findall(line.rest) for found in self._of(called, times, ops, unknown)
                )
                assert trips or unknown is not None or not any(inside), f"a loop of unknown length: {line.name}"
            for called in CALLED.findall(line.rest):
                yield from self._of(called, again, ops, unknown)

    def moved(self, mesh: Mesh) -> Counter[Moved]:
        """Every tensor that a collective moves, and how often."""
        found: Counter[Moved] = Counter()
        for _, line, times in self.executed(KINDS):
            kind = line.op.removesuffix("-start")
            axes = () if kind == PERMUTE else axes_of(replica_groups(line.rest, mesh.num_devices), mesh)
            wider = mesh.size(axes) if kind == "reduce-scatter" else 1
            for dtype, shape in line.shapes:
                found[Moved(kind, axes, dtype, prod(shape) * WIDTHS[dtype] * wider)] += int(times)
        return found

    def flops(self, blocks: Fraction | None = None) -> Fraction:
        """Two for each multiplication of the products of matrices that one device makes.

        ``blocks``: how many blocks of rows the loop over experts' rows computes, which depends on the tokens.
        """
        total = Fraction(0)
        for computation, line, times in self.executed("dot", blocks):
            shapes = {other.name: other.shapes[0][1] for other in self.computations[computation] if other.shapes}
            left = re.findall(r"%([\w.\-]+)", line.rest)[0]
            contracted = _numbers(re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)[1])  # type: ignore[index]
            total += 2 * times * prod(line.shapes[0][1]) * prod(shapes[left][dim] for dim in contracted)
        return total


def assert_program_is_the_plan(text: str, plan: Plan) -> None:
    """The program moves the bytes that the plan lists, kind by kind and axis by axis, and multiplies as often.

    Compared are sums, since layers that are stacked are reduced as one array. Beside the plan's there are three sums
    over a cut vocabulary in the loss, sums of single numbers (the loss, norms), and counts, which are integers. What is
    the same in every micro-step may be gathered once for all of them.
    """
    program = Program(text)
    moved_once = program.moved(plan.mesh)
    ragged = {row.axes for row in plan.collectives if row.ragged}
    for axes in ragged:
        _assert_exchanged(moved_once, plan, axes)
    ours: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for moved, times in moved_once.items():
        if moved.kind == "all-to-all" and moved.axes in ragged:
            continue
        if moved.dtype == "f32" and moved.bytes > WIDTHS["f32"]:
            ours[moved.kind, moved.axes] += moved.bytes * times
    theirs, once = planned_bytes(plan)
    differences = {key: ours[key] - theirs[key] for key in {*ours, *theirs} if ours[key] != theirs[key]}
    differences = {key: found for key, found in differences.items() if found != -once[key]}
    assert not differences, (differences, ours, theirs)


def _assert_exchanged(moved: Counter[Moved], plan: Plan, axes: tuple[str, ...]) -> None:
    """Where chunks differ in length CPU pads them: as many all-to-alls as planned, none of them smaller.

    A compiled one leaves a tensor from each device of the group.
    """
    planned = [row for row in plan.collectives if row.kind == "all-to-all" and row.axes == axes]
    planned = [row for row in planned if plan.by_name[row.tensors[0]].dtype == "float32"]
    found = {
        one: times
        for one, times in moved.items()
        if one.kind == "all-to-all" and one.axes == axes and one.dtype == "f32"
    }
    tensors = plan.mesh.size(axes) * sum(row.count_per_step for row in planned)
    assert sum(found.values()) == tensors, (found, planned)
    least = sum(row.bytes_per_device * row.count_per_step for row in planned)
    assert sum(one.bytes * times for one, times in found.items()) >= least, (found, planned)


def planned_bytes(plan: Plan) -> tuple[Counter[tuple[str, tuple[str, ...]]], Counter[tuple[str, tuple[str, ...]]]]:
    """Bytes by kind and axes of what the plan lists in float32, and what of it may be left out between micro-steps."""
    theirs: Counter[tuple[str, tuple[str, ...]]] = Counter()
    once: Counter[tuple[str, tuple[str, ...]]] = Counter()
    rows, repeats = plan.by_name, plan.request.micro_steps - 1
    ragged = {row.axes for row in plan.collectives if row.ragged}
    for row in plan.collectives:
        tensor = rows[row.tensors[0]]
        if tensor.dtype != "float32" or (row.kind == "all-to-all" and row.axes in ragged):
            continue
        key = (PERMUTE, ()) if row.kind == "permute" else (row.kind, row.axes)
        theirs[key] += row.bytes_per_device * row.count_per_step
        if tensor.kind == "weight" and tensor.stack is None and row.kind == "all-gather":
            once[key] += row.bytes_per_device * row.count_per_step * repeats // plan.request.micro_steps
    scores = rows["logits.scores"]
    if vocabulary := plan.mesh.larger_than_one(scores.in_use.axes_of("vocab")):
        tokens = scores.bytes_per_device // (scores.shape[-1] // plan.mesh.size(vocabulary))
        theirs["all-reduce", vocabulary] += 3 * tokens
    return theirs, once


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


assert WIDTHS["f32"] == DTYPE_BYTES["float32"]
