"""Trip counts of loops: (bound - start) / step, wherever the three are in the text; and products of nested trip counts."""

from __future__ import annotations

from fractions import Fraction

import pytest

from shardwright.compiled.text.calls import callers_of, executions
from shardwright.compiled.text.hlo import parse

BODY = """%body (p: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {{
  %p = (s32[], s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %x = f32[8]{{0}} get-tuple-element(%p), index=2
  {step}
  ROOT %t = (s32[], s32[], f32[8]{{0}}) tuple(%next, %{bound}, %x)
}}
"""
CONDITION = """%condition (q: (s32[], s32[], f32[8])) -> pred[] {{
  %q = (s32[], s32[], f32[8]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  %c = s32[] constant({bound})
  ROOT %r = pred[] {compare}
}}
"""
FUSED = """%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %l = pred[] compare(%a, %b), direction=LT
}

%plus (e: s32[]) -> s32[] {
  %e = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %f = s32[] add(%e, %two)
}

"""
ENTRY = """ENTRY %main (y: f32[8]) -> f32[8] {{
  %y = f32[8]{{0}} parameter(0)
  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %limit = s32[] constant(9)
  %state = (s32[], s32[], f32[8]{{0}}) tuple(%copied, %limit, %y)
  %w = (s32[], s32[], f32[8]{{0}}) while(%state), condition=%condition, body=%body{known}
  ROOT %z = f32[8]{{0}} get-tuple-element(%w), index=2
}}
"""
ONE = "%o = s32[] constant(1)\n  %next = s32[] add(%i, %o)"
TWICE = "%o = s32[] constant(1)\n  %half = s32[] add(%i, %o)\n  %next = s32[] add(%half, %o)"
UNTIL = "compare(%j, %c), direction=LT"

CASES = {
    "from 0 to 4 by 1": (ONE, UNTIL, 0, 4, 4),
    "from 0 to 4 by 2, in two additions": (TWICE, UNTIL, 0, 4, 2),
    "from 1 to 6 by 2": (TWICE, UNTIL, 1, 6, 3),
    "up to and with the bound": (ONE, "compare(%j, %c), direction=LE", 0, 4, 5),
    "the bound on the left": (ONE, "compare(%c, %j), direction=GT", 0, 4, 4),
    "until it is the bound": (TWICE, "compare(%j, %c), direction=NE", 0, 6, 3),
    "downwards": ("%o = s32[] constant(1)\n  %next = s32[] subtract(%i, %o)", "compare(%j, %c), direction=GT", 7, 4, 3),
    "never": (ONE, UNTIL, 5, 4, 0),
    "a loop-carried bound": (ONE, "compare(%j, %m), direction=LT", 3, 0, 6),
    "inside fusions": (
        "%next = s32[] fusion(%i), kind=kLoop, calls=%plus",
        "fusion(%j, %c), kind=kLoop, calls=%less",
        0,
        6,
        3,
    ),
}


def times_of(text: str, computation: str, unknown: Fraction | None = None) -> tuple[Fraction, bool]:
    program = parse(text)
    run = executions(program, callers_of(program), unknown)[computation]
    return run.times, run.counted


def loop(step: str, compare: str, start: int | str, bound: int, known: str = "", bound_element: str = "n") -> str:
    body = BODY.format(step=step, bound=bound_element)
    return FUSED + body + CONDITION.format(compare=compare, bound=bound) + ENTRY.format(start=start, known=known)


@pytest.mark.parametrize(("step", "compare", "start", "bound", "trips"), CASES.values(), ids=CASES)
def test_trips(step: str, compare: str, start: int, bound: int, trips: int) -> None:
    assert times_of(loop(step, compare, start, bound), "body") == (trips, True)


def test_the_compiler_knows_better() -> None:
    known = ', backend_config={"known_init_step":{"init":"0","step":"1"},"known_trip_count":{"n":"17"}}'
    assert times_of(loop(ONE, UNTIL, 0, 4, known), "body") == (17, True)


@pytest.mark.parametrize(
    "text",
    [
        loop("%next = s32[] multiply(%i, %i)", UNTIL, 0, 4),
        loop(ONE, "and(%j, %c)", 0, 4),
        loop(ONE, "compare(%j, %m), direction=LT", 0, 4, bound_element="i"),
        loop(ONE, UNTIL, 0, 4).replace("constant(0)", "custom-call()"),
    ],
    ids=["a product", "no comparison", "a bound that changes", "a start that nobody knows"],
)
def test_a_loop_without_a_known_trip_count(text: str) -> None:
    assert times_of(text, "body") == (1, False)
    assert times_of(text, "body", Fraction(7, 2)) == (Fraction(7, 2), True)


NESTED = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%called (g: f32[8]) -> f32[8] {
  %g = f32[8]{0} parameter(0)
  ROOT %h = f32[8]{0} negate(%g)
}

%inner (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %p = (s32[], f32[8]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %o = s32[] constant(1)
  %next = s32[] add(%i, %o)
  %y = f32[8]{0} call(%x), to_apply=%called
  ROOT %t = (s32[], f32[8]{0}, s32[]) tuple(%next, %y, %n)
}

%until (q: (s32[], f32[8], s32[])) -> pred[] {
  %q = (s32[], f32[8]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=2
  ROOT %r = pred[] compare(%j, %m), direction=LT
}

%outer (p2: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %p2 = (s32[], f32[8]{0}, s32[]) parameter(0)
  %i2 = s32[] get-tuple-element(%p2), index=0
  %x2 = f32[8]{0} get-tuple-element(%p2), index=1
  %n2 = s32[] get-tuple-element(%p2), index=2
  %zero = s32[] constant(0)
  %state2 = (s32[], f32[8]{0}, s32[]) tuple(%zero, %x2, %n2)
  %w2 = (s32[], f32[8]{0}, s32[]) while(%state2), condition=%until, body=%inner
  %x3 = f32[8]{0} get-tuple-element(%w2), index=1
  %o2 = s32[] constant(1)
  %next2 = s32[] add(%i2, %o2)
  ROOT %t2 = (s32[], f32[8]{0}, s32[]) tuple(%next2, %x3, %n2)
}

%until2 (q2: (s32[], f32[8], s32[])) -> pred[] {
  %q2 = (s32[], f32[8]{0}, s32[]) parameter(0)
  %j2 = s32[] get-tuple-element(%q2), index=0
  %three = s32[] constant(3)
  ROOT %r2 = pred[] compare(%j2, %three), direction=LT
}

%branch (b1: f32[8]) -> f32[8] {
  %b1 = f32[8]{0} parameter(0)
  ROOT %b2 = f32[8]{0} call(%b1), to_apply=%called
}

ENTRY %main (y: f32[8], which: s32[]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  %which = s32[] parameter(1)
  %first = s32[] constant(0)
  %five = s32[] constant(5)
  %state = (s32[], f32[8]{0}, s32[]) tuple(%first, %y, %five)
  %w = (s32[], f32[8]{0}, s32[]) while(%state), condition=%until2, body=%outer
  %x4 = f32[8]{0} get-tuple-element(%w), index=1
  %sum = f32[] reduce(%x4, %first), dimensions={0}, to_apply=%add
  ROOT %z = f32[8]{0} conditional(%which, %x4, %x4), branch_computations={%branch, %called}
}
"""


def test_enclosing_loops_multiply() -> None:
    """3 iterations around 5, whose bound is outside both; two branches, one of them by a call; no reducer."""
    program = parse(NESTED)
    runs = executions(program, callers_of(program))
    assert {name: (run.times, run.in_loop) for name, run in runs.items()} == {
        "main": (1, False),
        "outer": (3, True),
        "until2": (3, True),
        "inner": (15, True),
        "until": (15, True),
        "branch": (1, False),
        "called": (15 + 1 + 1, True),
    }
    assert all(run.counted for run in runs.values())
