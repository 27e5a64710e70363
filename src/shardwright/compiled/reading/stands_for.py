"""The kind of collective that a compiler replaced by another, if its text shows it.

| in the text | stands for |
|---|---|
| permutes in a loop `windowed_..._body_ag` | all-gather |
| the same with `_rs` | reduce-scatter |
| permutes named after a product, without a loop, of shards | all-gather |
| the same, of accumulated products | reduce-scatter |
| permutes of rows of a padded reduce-scatter | reduce-scatter |
| an all-reduce of zeros into which each device has written its shard | all-gather |
| an all-reduce of which each device only slices its shard | reduce-scatter |
"""

from __future__ import annotations

import re

from shardwright.compiled.text.calls import Callers
from shardwright.compiled.text.hlo import Computation, Instruction, Program
from shardwright.compiled.text.values import Value, made_from

_WINDOWED = re.compile(r"windowed_\w+_body_(ag|rs)\b")
_KIND = {"ag": "all-gather", "rs": "reduce-scatter"}
_ROWS = frozenset({"slice", "bitcast", "copy", "copy-start", "copy-done", "get-tuple-element", "reshape", "fusion"})
_GIVEN_ON = frozenset({"parameter", "bitcast", "copy", "copy-start", "copy-done"})
_SHARDS = frozenset({"dynamic-slice", "all-gather"})
_SUMS = frozenset({"dot", "convolution", "add"})
_PRODUCT = "/dot_general"
_DEEPEST = 6
_FARTHEST = 24


def permute_stands_for(program: Program, callers: Callers, where: Computation, permute: Instruction) -> str | None:
    """The kind that a permute stands for; None if the source program has the permute."""
    if found := windowed(where.name):
        return found
    name = permute.op_name
    if name is None:
        return "reduce-scatter" if repairs(program, callers, where, permute) else None
    if not name.endswith(_PRODUCT):
        return None
    return "reduce-scatter" if sends_sums(program, callers, where, permute) else "all-gather"


def sends_sums(program: Program, callers: Callers, where: Computation, permute: Instruction) -> bool:
    """Whether a permute sends results of products or sums, and not shards of an existing tensor.

    Zeros, the initial value of sums, count as sums.
    """
    values, seen = [Value(where, permute)], {permute.name}
    for _ in range(_FARTHEST):
        sources = [source for value in values for source in made_from(program, callers, value)]
        if any(source.one.op in _SUMS for source in sources):
            return True
        if any(source.one.op in _SHARDS for source in sources):
            return False
        values = [source for source in sources if source.one.name not in seen]
        if sources and all(source.one.op == "constant" for source in sources):
            return True
        seen.update(value.one.name for value in values)
    return False


def windowed(computation: str) -> str | None:
    """The kind that the permutes inside a loop stand for, by the name of its body.

    >>> windowed("wide.windowed_dot_general_body_ag.1.sunk"), windowed("wide.region_0.1_spmd")
    ('all-gather', None)
    """
    found = _WINDOWED.search(computation)
    return _KIND[found[1]] if found else None


def repairs(program: Program, callers: Callers, where: Computation, permute: Instruction) -> bool:
    """Whether a permute moves rows of a padded reduce-scatter to the device that owns them."""
    values = [Value(where, permute)]
    for _ in range(_DEEPEST):
        values = [source for value in values[:_DEEPEST] for source in made_from(program, callers, value)]
        if any(source.one.op == "fusion" and _is_padded_scatter(program, source.one) for source in values):
            return True
        values = [source for source in values if source.one.op in _ROWS]
    return False


def sum_stands_for(
    program: Program, callers: Callers, where: Computation, all_reduce: Instruction, used_for: tuple[str, ...]
) -> str | None:
    """The kind that an all-reduce stands for, by its operands and users."""
    operands = [where.by_name.get(name) for name in all_reduce.operands]
    if operands and all(one is not None and _is_written_into(program, callers, Value(where, one)) for one in operands):
        return "all-gather"
    return "reduce-scatter" if used_for == ("dynamic-slice",) else None


def _is_written_into(program: Program, callers: Callers, value: Value) -> bool:
    """Whether a value, copied or given to an asynchronous call, is one into which a shard was written."""
    for _ in range(_DEEPEST):
        root = _root(program, value.one)
        if root.op not in _GIVEN_ON:
            return root.op == "dynamic-update-slice"
        sources = list(made_from(program, callers, value))
        if len(sources) != 1:
            return False
        value = sources[0]
    return False


def _is_padded_scatter(program: Program, fusion: Instruction) -> bool:
    callee = fusion.callee("calls") or ""
    called = program.computations.get(callee)
    if not callee.startswith("all-reduce-scatter") or called is None:
        return False
    return any(one.op == "pad" for one in called.instructions)


def _root(program: Program, one: Instruction) -> Instruction:
    called = program.computations.get(one.callees[0]) if one.op == "fusion" and one.callees else None
    return called.root if called is not None else one
