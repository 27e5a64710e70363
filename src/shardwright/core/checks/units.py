"""Dims that their axes do not divide: SW107 where units would be split, SW104 for padding and uneven shards."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from shardwright.core.boxes.reloading import reloading
from shardwright.core.checks.edits import attention_move, resized
from shardwright.core.checks.tensors import largest_first, weight_rows
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import PADDING_WARNING_SHARE
from shardwright.core.layout.roles import EXCHANGED_FOR_HEADS, UNIT_NAMES
from shardwright.core.layout.wording import count, counted, either, every, others, percent, plural, product
from shardwright.core.mesh.divisors import divisors, nearest_divisors
from shardwright.core.mesh.notation import place_in
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import Weight
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.plan.resharding import weight_reshardings
from shardwright.core.resolution.padding import PADDED_AXIS

MOST_SHARDS = 4096
"""Shards in use of one dim, beyond which it is not said what a checkpoint of PyTorch's own makes of them."""

Group = tuple[str, tuple[str, ...], int]
"""A logical axis, the axes that shard it, and its number of units."""


def split_units(plan: Plan) -> Iterator[Draft]:
    """SW107: heads, KV heads and experts that would be split, and weights that their axes do not divide.

    Checked for weights, and for activations where heads are exchanged for tokens (``move: {attention: ulysses}``).
    """
    groups: dict[Group, list[TensorPlan]] = {}
    for tensor, weight in weight_rows(plan):
        for name in weight.logical_axes:
            if tensor.unpadded is not None and name == PADDED_AXIS:
                continue
            axes = _unit_axes(plan, tensor, weight, name)
            large = plan.mesh.larger_than_one(axes)
            if weight.units_of(name) % plan.mesh.size(large):
                groups.setdefault((name, large, weight.units_of(name)), []).append(tensor)
    for (name, axes, units), tensors in groups.items():
        if plan.request.properties.uneven_shards and not _has_units(name, plan, tensors):
            continue
        yield _split(plan, name, axes, units, tensors)
    for (name, axes, units), tensors in _exchanged(plan).items():
        if all(name != reported for reported, _, _ in groups):
            yield _split(plan, name, axes, units, tensors)


def _exchanged(plan: Plan) -> dict[Group, list[TensorPlan]]:
    """Heads of activations that are not divisible by the context axes that shard them in exchange for tokens."""
    groups: dict[Group, list[TensorPlan]] = {}
    for tensor in plan.activations:
        for name, size in zip(tensor.in_use.logical_axes, tensor.shape, strict=True):
            axes = plan.mesh.larger_than_one(tensor.in_use.axes_of(name))
            if name in EXCHANGED_FOR_HEADS and size % plan.mesh.size(axes):
                groups.setdefault((name, axes, size), []).append(tensor)
    return groups


def _unit_axes(plan: Plan, tensor: TensorPlan, weight: Weight, name: str) -> tuple[str, ...]:
    """The axes that must divide the number of units of a dim: those in use, and those that shard experts.

    Storage axes must divide only the number of elements (under PyTorch not even this). The choice of a storage dim ensures
    it, but a rule may give a dim axes that do not divide.
    """
    assert tensor.at_rest is not None
    in_use, at_rest = tensor.in_use.axes_of(name), tensor.at_rest.axes_of(name)
    expert = tuple(a for a in at_rest if plan.request.layout.role(a, weight.component) == "expert")
    axes = in_use or (expert if name == "experts" else ())
    uneven = not plan.request.properties.uneven_shards and weight.size(name) % plan.mesh.size(at_rest) != 0
    return at_rest if uneven and weight.units_of(name) % plan.mesh.size(axes) == 0 else axes


def _has_units(name: str, plan: Plan, tensors: list[TensorPlan]) -> bool:
    by_name = {tensor.name: weight for tensor, weight in weight_rows(plan)}
    return name in UNIT_NAMES or any((by_name[t.name].unit or {}).get(name, 1) > 1 for t in tensors)


def _split(plan: Plan, name: str, axes: tuple[str, ...], units: int, tensors: list[TensorPlan]) -> Draft:
    tensor, *rest = largest_first(tensors)
    number, spec, mark = _caret(tensor, name, axes)
    shards = plan.mesh.size(axes)
    unit = UNIT_NAMES.get(name, "element")
    noun = f"of {'an' if unit[0] in 'aeiou' else 'a'} {unit}" if units < shards else plural(unit)
    each = f"{units / shards:.4g} {noun}"
    also = f"; {others([tensor.name, *(t.name for t in rest)], tensor.kind)}" if rest else ""
    finding = Finding(
        code="SW107",
        severity="error",
        tensor=tensor.name,
        where=f"dim {number} ('{name}') of {tensor.name}",
        notation=str(spec),
        mark=mark,
        found=f"{counted(units, name)} over {product(plan.mesh, axes)}: {each} on each device{also}",
        needed=_legal_text(units, shards),
        cost=f"{count(shards, 'device')} for {counted(units, name)}: {percent(1 - units / shards)} of them would repeat "
        "the work of another"
        if units < shards
        else "",
    )
    instead = (attention_move("gather"),) if tensor.kind == "activation" else ()
    return Draft(finding=finding, candidates=(*_legal_sizes(plan, axes, units), *instead))


def _legal_text(size: int, near: int) -> str:
    """The sizes that divide: all of them where they are few, otherwise the nearest."""
    nearest = sorted(nearest_divisors(size, near))
    which = "" if len(nearest) == len(divisors(size)) else "the nearest are "
    return f"a product that divides {size}: {which}{either(nearest)}"


def _caret(tensor: TensorPlan, name: str, axes: tuple[str, ...]) -> tuple[int, Spec, tuple[int, int]]:
    """Number of the dim, the spec to show, and the place of the dim in it."""
    spec = tensor.in_use if set(axes) <= set(tensor.in_use.axes_of(name)) else tensor.spec
    place = spec.logical_axes.index(name)
    return place, spec, place_in(spec, place)


def _legal_sizes(plan: Plan, axes: tuple[str, ...], units: int) -> Iterator[Candidate]:
    """One axis at a time, the minor one first, at the nearest size below that divides."""
    for axis in reversed(axes):
        rest = plan.mesh.size(a for a in axes if a != axis)
        if units % rest == 0:
            for size in reversed([s for s in divisors(units // rest) if s < plan.mesh.size(axis)]):
                yield from resized(plan, axis, size)


def padded(plan: Plan) -> Iterator[Draft]:
    """SW104: padded vocabularies, dims of activations that JAX pads, and dims of weights that PyTorch shards unevenly."""
    reported = set()
    for tensor, weight in weight_rows(plan):
        yield from _padded_weight(plan, tensor, reported)
        if plan.request.properties.uneven_shards:
            yield from _uneven(plan, tensor, weight, reported)
        # An activation counts heads where PyTorch's weight counts elements; the weight has its own finding already.
        for dim in tensor.in_use.dims[-len(tensor.shape) :]:
            reported.add((dim.logical_axis, weight.units_of(dim.logical_axis), plan.mesh.larger_than_one(dim.axes)))
    for tensor in plan.activations:
        for number, (dim, size) in enumerate(zip(tensor.in_use.dims, tensor.shape, strict=True)):
            axes = plan.mesh.larger_than_one(dim.axes)
            key = (dim.logical_axis, size, axes)
            # SW107 reports heads of activations, as it reports those of weights.
            if (
                dim.logical_axis in ("batch", "length", "q_length", *EXCHANGED_FOR_HEADS)
                or size % plan.mesh.size(axes) == 0
                or key in reported
            ):
                continue
            reported.add(key)
            yield _padding(plan, tensor, number, size, axes)


def _padded_weight(plan: Plan, tensor: TensorPlan, reported: set) -> Iterator[Draft]:
    """A vocabulary that is padded in memory."""
    if tensor.unpadded is None:
        return
    number = tensor.in_use.logical_axes.index(PADDED_AXIS)
    size, held = tensor.unpadded[number], tensor.shape[number]
    # In use, at rest, or in the second use of a tied weight: the first whose axes do not divide it.
    uses = (use.operand for use in weight_reshardings(plan.request, plan.mesh, tensor).values())
    specs = (tensor.in_use, tensor.spec, *uses)
    sharding = next(spec for spec in specs if size % plan.mesh.size(spec.axes_of(PADDED_AXIS)))
    axes = plan.mesh.larger_than_one(sharding.axes_of(PADDED_AXIS))
    if (key := ("padded", size, held, axes)) in reported:
        return
    reported.add(key)
    share = held / size - 1
    # JAX pads until the axes at rest divide it; what ``fully_shard`` shards may still be uneven.
    largest, _, more = _chunked(plan, held, tensor.in_use.axes_of(PADDED_AXIS), tensor.spec.axes_of(PADDED_AXIS))
    shards = f"; shards of {largest} at most" if more else ""
    gathered = f", and {percent(more)} more bytes in each gather" if more else ""
    much = max(share, more) >= PADDING_WARNING_SHARE.value
    finding = Finding(
        code="SW104",
        severity="warning" if much else "info",
        tensor=tensor.name,
        where=f"dim {number} ('{PADDED_AXIS}') of {tensor.name}",
        notation=str(sharding),
        mark=place_in(sharding, number),
        found=f"{counted(size, PADDED_AXIS)} over {product(plan.mesh, axes)}: padded to {held} in memory, never in a checkpoint"
        f"{shards}",
        needed=_legal_text(size, plan.mesh.size(axes)),
        cost=f"{percent(share)} more memory and compute for this tensor{gathered}",
    )
    yield Draft(finding=finding, candidates=tuple(_legal_sizes(plan, axes, size)) if much else ())


def _padding(plan: Plan, tensor: TensorPlan, number: int, size: int, axes: tuple[str, ...]) -> Draft:
    shards = plan.mesh.size(axes)
    held = ceil(size / shards) * shards
    name = tensor.in_use.logical_axes[number]
    finding = Finding(
        code="SW104",
        severity="warning",
        tensor=tensor.name,
        where=f"dim {number} ('{name}') of {tensor.name}",
        notation=str(tensor.in_use),
        mark=place_in(tensor.in_use, number),
        found=f"{counted(size, name)} over {product(plan.mesh, axes)}: padded to {held}",
        needed=_legal_text(size, shards),
        cost=f"{percent(held / size - 1)} more memory and compute for this tensor",
    )
    return Draft(finding=finding, candidates=tuple(_legal_sizes(plan, axes, size)))


def _uneven(plan: Plan, tensor: TensorPlan, weight: Weight, reported: set) -> Iterator[Draft]:
    """PyTorch's `fully_shard` chunks dim 0, and the last shards are short or empty.

    Shards in use must be equal. Where the axes in use do not divide the dim, the cost says what PyTorch's own checkpoint
    of the very dim is: of 1,024 small layouts 71 are not right (pytorch#168134, pytorch#161368).
    """
    assert tensor.at_rest is not None
    for number, dim in enumerate(tensor.at_rest.dims[-len(tensor.shape) :]):
        if tensor.unpadded is not None and dim.logical_axis == PADDED_AXIS:
            # The finding about its padding says it too.
            continue
        size = tensor.shape[number]
        in_use = plan.mesh.larger_than_one(tensor.in_use.axes_of(dim.logical_axis))
        axes = plan.mesh.larger_than_one(dim.axes)
        unequal = size % plan.mesh.size(in_use) and dim.logical_axis not in UNIT_NAMES and not weight.unit
        key = ("uneven", dim.logical_axis, size, in_use if unequal else axes)
        if key in reported:
            continue
        reported.add(key)
        spec, mark = tensor.at_rest, place_in(tensor.at_rest, tensor.at_rest.logical_axes.index(dim.logical_axis))
        where = f"dim {number} ('{dim.logical_axis}') of {tensor.name}"
        if unequal:
            finding = Finding(
                code="SW104",
                severity="error",
                tensor=tensor.name,
                where=where,
                notation=str(spec),
                mark=mark,
                found=f"{counted(size, dim.logical_axis)} over {product(plan.mesh, in_use)}, in uneven shards",
                needed=_legal_text(size, plan.mesh.size(in_use)),
                cost=_reloaded(plan, size, in_use, axes),
            )
            yield Draft(finding=finding, candidates=tuple(_legal_sizes(plan, in_use, size)))
        elif size % plan.mesh.size(in_use) == 0 and size % plan.mesh.size(axes):
            yield _uneven_shards(plan, tensor, where, mark, counted(size, dim.logical_axis), size, axes, in_use)


def _reloaded(plan: Plan, size: int, in_use: tuple[str, ...], axes: tuple[str, ...]) -> str:
    """What a checkpoint of PyTorch's own makes of a dim with unequal shards in use."""
    sizes, gathered = plan.mesh.shape, plan.mesh.size(axes) // plan.mesh.size(in_use)
    if plan.mesh.size(in_use) > MOST_SHARDS:
        return ""
    found = reloading(size, tuple(sizes[axis] for axis in in_use), gathered)
    if found.is_right:
        return "none in a checkpoint of torch.distributed.checkpoint, which is right for these shards"
    if not found.is_saved:
        return "torch.distributed.checkpoint refuses to save these shards"
    wrong = []
    if found.stale:
        wrong.append(f"leaves {found.stale} of {count(found.ranks, 'rank')} with old rows under this layout")
    if found.moved:
        wrong.append("has rows in another order under others")
    if found.short:
        wrong.append("fails under others")
    return f"torch.distributed.checkpoint saves these shards, and a load {every(wrong)}"


def _uneven_shards(
    plan: Plan,
    tensor: TensorPlan,
    where: str,
    mark: tuple[int, int],
    shown: str,
    size: int,
    axes: tuple[str, ...],
    in_use: tuple[str, ...],
) -> Draft:
    """The shard of each device of the axes in use, chunked again over the storage axes."""
    largest, empty, more = _chunked(plan, size, in_use, axes)
    none = f", and {count(empty, 'device')} with none" if empty else ""
    return Draft(
        finding=Finding(
            code="SW104",
            severity="warning" if more >= PADDING_WARNING_SHARE.value else "info",
            tensor=tensor.name,
            where=where,
            notation=str(tensor.at_rest),
            mark=mark,
            found=f"{shown} over {product(plan.mesh, axes)}: shards of {largest} at most{none}",
            needed=f"a size that {plan.mesh.size(axes)} divides",
            cost=f"{percent(more)} more bytes in each gather of this weight",
        )
    )


def _chunked(plan: Plan, size: int, in_use: tuple[str, ...], axes: tuple[str, ...]) -> tuple[int, int, float]:
    """The largest shard of ``axes`` where those in use divide a dim, how many devices have none, and the share of bytes that
    a gather moves in addition."""
    in_use_size = size // plan.mesh.size(in_use)
    chunks = plan.mesh.size(axes) // plan.mesh.size(in_use)
    largest = ceil(in_use_size / chunks)
    empty = (chunks - ceil(in_use_size / largest)) * plan.mesh.size(in_use)
    return largest, empty, largest * chunks / in_use_size - 1
