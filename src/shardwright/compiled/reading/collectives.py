"""The collectives of a compiled program: one row for each tensor of a collective, equal rows counted together.

| in the text | what it is |
|---|---|
| `all-gather-start`, `all-gather-done` | one all-gather; the start has inputs and outputs, the outputs count |
| `call-start` of a computation with a collective | that collective, asynchronous |
| one collective in several fusions, the first with `AsyncCollectiveStart` | one, done in steps; the first counts |
| a fusion that calls `all-reduce-scatter...` | a reduce-scatter, of the result times the group size |
| `ragged-all-to-all` | a ragged all-to-all |
| `all-to-all` with a tuple result | one tensor, split into one array per device |
| any other with several operands | one row each |
| `send` and `recv` with `_xla_megascale_transfer_type` | a collective across slices |
| `send` and `recv` with pairs | send-recv |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardwright.compiled.reading.expansion import made_from_bytes
from shardwright.compiled.reading.invariance import is_loop_invariant
from shardwright.compiled.reading.overlap import computations_with_products, is_overlapped, is_overlapped_in_steps
from shardwright.compiled.reading.program import CompiledCollective
from shardwright.compiled.reading.stands_for import permute_stands_for, sum_stands_for
from shardwright.compiled.text.calls import Call, Callers, Execution
from shardwright.compiled.text.groups import Groups, replica_groups, source_target_pairs
from shardwright.compiled.text.hlo import Computation, Instruction, Program
from shardwright.compiled.text.numbering import Numbering
from shardwright.compiled.text.origins import NOWHERE, Origin, Sources, filled, merged, origins_of
from shardwright.compiled.text.shapes import Array, arrays, our_dtype, type_of
from shardwright.compiled.text.uses import uses
from shardwright.compiled.text.values import Value, origin_of, used_by

KINDS: Mapping[str, str] = {
    **{kind: kind for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")},
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
"""Our name of each kind, by the compiler's name."""

_RESHARDING_KINDS = ("all-gather", "all-to-all", "permute")
_STARTS = {f"{op}-start": op for op in KINDS}
_SCATTERS = "all-reduce-scatter"
_IN_STEPS = '"async_collective_fusion_config"'
_FIRST_STEP = '"AsyncCollectiveStart"'
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What reading a collective needs. ``overlap_known``: the order of the text shows which collectives overlap. ``with_products``: the
    computations that have products."""

    program: Program
    callers: Callers
    numbering: Numbering
    sources: Sources
    overlap_known: bool
    with_products: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A tensor of a collective, in bytes of one device; ``shape``: of its result."""

    dtype: str
    num_bytes: int
    shape: tuple[int, ...]
    padding: int = 0


def read_collectives(
    program: Program,
    callers: Callers,
    runs: Mapping[str, Execution],
    numbering: Numbering,
    sources: Sources,
    *,
    overlap_known: bool,
) -> tuple[CompiledCollective, ...]:
    """Every collective that runs in a step, equal ones as one row, in text order."""
    context = Context(
        program=program,
        callers=callers,
        numbering=numbering,
        sources=sources,
        overlap_known=overlap_known,
        with_products=computations_with_products(program),
    )
    rows: dict[CompiledCollective, list[int]] = {}
    for name, computation in program.computations.items():
        run = runs.get(name)
        if run is None or not run.times:
            continue
        for row in _of_computation(context, computation):
            here = replace(row, in_loop=run.in_loop, trips_known=run.counted)
            counts = rows.setdefault(here, [0, 0])
            counts[0] += int(run.times)
            counts[1] += 1
    return tuple(replace(row, count_per_step=times, num_ops=ops) for row, (times, ops) in rows.items())


def _of_computation(context: Context, where: Computation) -> Iterator[CompiledCollective]:
    for one in where.instructions:
        if one.op in KINDS or one.op in _STARTS:
            yield from _collective(context, where, one)
        elif one.op == "send":
            yield from _sent(context, where, one)


def _collective(context: Context, where: Computation, one: Instruction) -> Iterator[CompiledCollective]:
    op = _STARTS.get(one.op, one.op)
    if _IN_STEPS in one.rest and not _is_first_step(where):
        return
    groups = source_target_pairs(one.rest) if op == "collective-permute" else None
    pairs = groups is not None
    if groups is None:
        groups = replica_groups(one.rest, context.numbering.num_devices)
    axes = context.numbering.axes(groups)
    if not axes:
        return
    size = len(groups[0])
    callers = context.callers.get(where.name, ())
    outside = callers[0] if len(callers) == 1 and callers[0].instruction.op != "while" else None
    scatters = op == "all-reduce" and outside is not None and where.name.startswith(_SCATTERS)
    kind = "reduce-scatter" if scatters else KINDS[op]
    moved = _scattered(where, one) if scatters else _moved(where, one, op, size)
    common = CompiledCollective(
        kind=kind,
        axes=axes,
        bytes_per_device=0,
        count_per_step=0,
        dtypes=(),
        source=_source(context, one, outside),
        ragged=op == "ragged-all-to-all",
        overlapped=_overlapped(context, where, one, outside),
        group_size=None if pairs else size,
        maximum=_takes_the_largest(context, one),
        loop_invariant=is_loop_invariant(context.callers, where, one),
    )
    origins = _origins(context, where, one, outside, len(moved))
    for place, (tensor, origin) in enumerate(zip(moved, origins, strict=True)):
        row = _with(common, tensor, origin)
        yield row if scatters else _with_surroundings(context, where, one, place if len(moved) > 1 else None, row)


def _takes_the_largest(context: Context, one: Instruction) -> bool:
    reducer = context.program.computations.get(one.callee("to_apply") or "")
    return reducer is not None and reducer.root.op == "maximum"


def _with(common: CompiledCollective, tensor: Moved, origin: Origin) -> CompiledCollective:
    return replace(
        common,
        bytes_per_device=tensor.num_bytes,
        padding_bytes=tensor.padding,
        shape=tensor.shape,
        dtypes=(our_dtype(tensor.dtype),),
        component=origin.component,
        phase=origin.phase,
        tensors=origin.tensors,
        operation=origin.operation,
    )


def _with_surroundings(
    context: Context, where: Computation, one: Instruction, element: int | None, row: CompiledCollective
) -> CompiledCollective:
    """The row of a tensor, with its users, the bytes that it was expanded from, and the kind that it stands for."""
    program, callers = context.program, context.callers
    packed = any(operand.op == "concatenate" for operand in _makers(program, where, one))
    # The users of a collective in steps are those of its last step, which the first does not name.
    in_steps = _IN_STEPS in one.rest
    used_for = () if in_steps else uses(program, callers, where, one, element, packed=packed)
    stands_for = made_from = None
    if row.kind == "permute":
        stands_for = permute_stands_for(program, callers, where, one)
    elif row.kind == "all-reduce":
        stands_for = sum_stands_for(program, callers, where, one, used_for)
    if row.kind in _RESHARDING_KINDS:
        made_from = made_from_bytes(program, callers, where, one.operands[element or 0])
        if made_from is not None and row.kind == "all-gather":
            made_from *= row.group_size or 1
    return replace(row, users=used_for, stands_for=stands_for, made_from_bytes=made_from)


def _makers(program: Program, where: Computation, one: Instruction) -> Iterator[Instruction]:
    """The instructions that produce the operands of an instruction, also inside fusions."""
    for name in one.operands:
        operand = where.by_name.get(name)
        if operand is not None:
            called = program.computations.get(operand.callees[0]) if operand.op == "fusion" else None
            yield operand if called is None else called.root


def _moved(where: Computation, one: Instruction, op: str, size: int) -> list[Moved]:
    """The tensors of a collective; bytes are those of operand or result, whichever is larger."""
    found = type_of(one.type)
    started = one.op in _STARTS and op != "all-reduce"
    results = [a for a in arrays(found[1] if started and isinstance(found, tuple) else found) if a.dtype != "token"]
    if op == "all-to-all" and len(results) > 1 and "dimensions=" not in one.rest:
        num_bytes = sum(array.num_bytes for array in results)
        return [Moved(dtype=results[0].dtype, num_bytes=num_bytes, shape=results[0].dims)]
    if op == "ragged-all-to-all":
        taken = _first_array(where, one.operands[0])
        return [Moved(dtype=a.dtype, num_bytes=max(a.num_bytes, taken), shape=a.dims) for a in results[:1]]
    wider = size if op == "reduce-scatter" else 1
    return [Moved(dtype=a.dtype, num_bytes=a.num_bytes * wider, shape=a.dims) for a in results]


def _scattered(where: Computation, one: Instruction) -> list[Moved]:
    """The tensors of a fused reduce-scatter: the operands of its sum, padded or not. Its result is that of the fusion."""
    found: list[Moved] = []
    leaves = where.root.arrays if len(where.root.arrays) == len(one.arrays) else one.arrays
    for array, left, name in zip(one.arrays, leaves, one.operands, strict=True):
        unpadded = _unpadded(where, name) or array.num_bytes
        padding = array.num_bytes - unpadded
        found.append(Moved(dtype=array.dtype, num_bytes=array.num_bytes, shape=left.dims, padding=padding))
    return found


def _unpadded(where: Computation, name: str) -> int:
    """Bytes of a value before its rows and tiles were padded."""
    one = where.by_name.get(name)
    while one is not None and one.op in ("pad", "bitcast"):
        one = where.by_name.get(one.operands[0])
    return one.arrays[0].num_bytes if one is not None and one.arrays else 0


def _first_array(where: Computation, name: str) -> int:
    one = where.by_name.get(name)
    return one.arrays[0].num_bytes if one is not None and one.arrays else 0


def _origins(
    context: Context, where: Computation, one: Instruction, outside: Call | None, number: int
) -> Iterable[Origin]:
    """The origin of each tensor: from its own name among merged ones, else from the reducer and from its operands.

    Some compilers keep one name of several merged collectives. The origin of each tensor is then that of its neighbours.
    """
    name = one.op_name or (outside.instruction.op_name if outside is not None else None)
    named = [origin for origin in origins_of(name) if origin != NOWHERE] if name is not None else []
    if len(named) == number or (number == 1 and named):
        return named if len(named) == number else [merged(named)]
    known = replace(merged(named), tensors=()) if named else NOWHERE
    reducer = _reducer_origin(context.program, one)
    # The reducer of merged sums has the scopes of one of them; the text does not show which.
    own = reducer if number == 1 else NOWHERE
    operation = known.operation or reducer.operation
    found: list[Origin] = []
    for place in range(number):
        neighbour = _neighbour_origin(context, where, one, place)
        found.append(replace(filled(filled(own, neighbour), known), operation=operation))
    return found


def _neighbour_origin(context: Context, where: Computation, one: Instruction, place: int) -> Origin:
    """The origin of a tensor's operand; for an all-gather, of its users."""
    if one.op.startswith("all-gather"):
        return used_by(Value(where, one, place))
    operand = where.by_name.get(one.operands[place]) if place < len(one.operands) else None
    return NOWHERE if operand is None else origin_of(context.program, context.callers, Value(where, operand))


def _reducer_origin(program: Program, one: Instruction) -> Origin:
    """The scopes of the reducer; for sums of gradients often the only name that is left."""
    reducer = program.computations.get(one.callee("to_apply") or "")
    for parameter in reducer.instructions if reducer is not None else ():
        if parameter.op == "parameter" and (name := parameter.op_name) is not None:
            return replace(merged(origins_of(name)), phase=None)
    return NOWHERE


def _source(context: Context, one: Instruction, outside: Call | None) -> str | None:
    found = context.sources.of_instruction(one.rest)
    return found or (context.sources.of_instruction(outside.instruction.rest) if outside is not None else None)


def _overlapped(context: Context, where: Computation, one: Instruction, outside: Call | None) -> bool | None:
    if one.op in _STARTS:
        return is_overlapped(context.with_products, where, one)
    if _IN_STEPS in one.rest and outside is not None:
        return is_overlapped_in_steps(
            context.program,
            context.with_products,
            outside.computation,
            outside.instruction,
            one.number("channel_id"),
        )
    if outside is not None and outside.instruction.op in ("call-start", "async-start"):
        return is_overlapped(context.with_products, outside.computation, outside.instruction)
    return False if context.overlap_known else None


def _is_first_step(where: Computation) -> bool:
    return any(one.op == "custom-call" and _FIRST_STEP in one.rest for one in where.instructions)


def _sent(context: Context, where: Computation, send: Instruction) -> Iterator[CompiledCollective]:
    """A transfer to other slices or to the target of a pair; not a transfer to the host."""
    sent = next((array for array in send.arrays), None)
    if sent is None:
        return
    groups: Groups = source_target_pairs(send.rest) or ()
    transfer = _TRANSFER.search(send.rest)
    axes = context.numbering.across_slices if transfer else context.numbering.axes(groups)
    if not axes:
        return
    kind = transfer[1].lower().replace("_", "-") if transfer else "send-recv"
    known = kind in KINDS
    received = _received(where, send)
    common = CompiledCollective(
        kind=kind if known else "send-recv",
        axes=axes,
        bytes_per_device=0,
        count_per_step=0,
        dtypes=(),
        source=_source(context, send, None),
        overlapped=is_overlapped(context.with_products, where, send),
        group_size=context.numbering.num_slices if transfer and known else None,
        across_slices=transfer is not None,
    )
    tensor = Moved(
        dtype=sent.dtype,
        num_bytes=max(sent.num_bytes, received.num_bytes if received else 0),
        shape=(received or sent).dims,
    )
    name = send.op_name
    origin = merged(origins_of(name)) if name else origin_of(context.program, context.callers, Value(where, send))
    yield _with(common, tensor, origin if name else replace(origin, operation=None))


def _received(where: Computation, send: Instruction) -> Array | None:
    """The array received in the same rendezvous as a send."""
    rendezvous = _RENDEZVOUS.search(send.rest)
    for one in where.instructions if rendezvous else ():
        found = _RENDEZVOUS.search(one.rest) if one.op == "recv" else None
        if found and rendezvous and found[1] == rendezvous[1]:
            return next(iter(one.arrays), None)
    return None
