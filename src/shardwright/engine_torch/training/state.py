"""The state of a run between steps on one rank: weights, what the optimizer keeps for them, buffers and the step number.

Everything is made, read and saved in boxes of the table's dims, however PyTorch stores it (``core/boxes/stored.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch

from shardwright.checkpoint import OwnedBox, TensorInfo
from shardwright.checkpoint.exchange.passing import Together
from shardwright.checkpoint.exchange.wants import Want, needed_by_all, wants_of_plan
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import saves, shard_box
from shardwright.core.boxes.stored import TableBox, table_boxes
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.optimizer import MASTER
from shardwright.core.model.table import Weight
from shardwright.core.plan.fsdp_groups import WeightOfLayer, trained
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.plan.saved_boxes import in_stack
from shardwright.core.quantization.delayed import FACTOR, HISTORY, DelayedTensor
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.exchange import RankCarrier
from shardwright.engine_torch.io.host import Moment, bits_of, copied_bits, now_on
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.model.stage import Stage
from shardwright.engine_torch.precision.delayed import Kept
from shardwright.engine_torch.stages.tied import copy_tied, counted_elsewhere
from shardwright.init import box_values
from shardwright.runs import HeldReplica, Reads, Weights
from shardwright.training.optimizer import FIRST, SECOND, STATE, kept_tensors, owner_of, saved_as
from shardwright.training.optimizers import OPTIMIZER, is_own
from shardwright.training.published import KEPT

Read = Callable[[str, Sequence[Box]], Sequence[torch.Tensor]]
"""``read(name, boxes)``: several boxes of a tensor of the state, by its name in a checkpoint."""


class State:
    """What a step changes in place. ``kept``: what the optimizer keeps for each parameter, and its average, by prefix and by the
    parameter's key, sharded as its update.

    ``shared``: other state of an optimizer of PyTorch, as a count of steps, by its name in a checkpoint. Such an optimizer keeps nothing before
    its first step. ``step``: the number of steps done. Buffers are the model's.
    """

    def __init__(self, model: Model, step: int) -> None:
        self.model, self.step = model, step
        self.kept: dict[str, dict[str, torch.Tensor]] = {one.prefix: {} for one in model.plan.request.kept}
        self.shared: dict[str, torch.Tensor] = {}

    @property
    def first(self) -> dict[str, torch.Tensor]:
        """AdamW's first moments."""
        return self.kept[FIRST]

    @property
    def second(self) -> dict[str, torch.Tensor]:
        """AdamW's second moments."""
        return self.kept[SECOND]


def make_state(model: Model, read: Read, step: int) -> State:
    """The state whose boxes are those that ``read`` returns; each rank reads its own boxes, and no others."""
    plan, ranks = model.plan, model.ranks
    state = State(model, step)
    starts = step == 0 and is_own(plan.request.optimizer)
    kept = {
        (one.prefix, one.weight): torch_dtype(one.dtype)
        for one in kept_tensors(plan)
        if not (starts and one.prefix.startswith(OPTIMIZER))
    }
    if not starts:
        state.shared = {
            name: read(name, [Box.whole(shape)])[0] for name, (shape, _) in plan.request.optimizer.shared.items()
        }
    # All layers of a weight at once: a checkpoint may store them as one box. All ranks read all weights, also those of other stages.
    codes = {one.name for one in plan.quantized if one.rests}
    layers: dict[str, list[tuple[WeightOfLayer, torch.Tensor]]] = {
        row.name: [] for row in trained(plan.request, plan.weights)
    }
    for one, parameter in _each(model):
        layers[one.weight].append((one, local_of(parameter)))
    for name, found in layers.items():
        # What rests as codes follows from its master weight: no rank reads the weight itself.
        if name not in codes:
            with torch.no_grad():
                _fill(plan, name, found, ranks, read)
        for prefix, into in state.kept.items():
            if (dtype := kept.get((prefix, name))) is not None:
                made = [
                    (one, torch.empty(shape_in_update(one, local, ranks), dtype=dtype, device=ranks.device))
                    for one, local in found
                ]
                _fill(plan, prefix + name, made, ranks, read, in_update=True)
                into.update((one.key, local) for one, local in made)
    for row in _frozen(plan):
        stages = [stage for stage in model.stages.values() if row.name in stage.plan.by_name]
        found = read(row.name, [_frozen_box(stage, row.name) for stage in stages])
        for stage, values in zip(stages, found, strict=True):
            stage.frozen[row.name] = values.to(ranks.device)
    _fill_delayed(model, read)
    copy_tied(model)
    rest_as_codes(model, state)
    return state


def rest_as_codes(model: Model, state: State) -> None:
    """Make the codes that rest of the master weights."""
    for stage in model.stages.values():
        stage.rest_as_codes(state.kept.get(MASTER.prefix, {}))


def _fill_delayed(model: Model, read: Read) -> None:
    arrays: dict[Stage, dict[str, torch.Tensor]] = {stage: {} for stage in model.stages.values()}
    for named in model.plan.delayed_tensors:
        places = [place for place in _delayed_boxes(model) if place[1].name == named.name]
        for (stage, one, box, _), values in zip(
            places, read(named.name, [stored for *_, stored in places]), strict=True
        ):
            # A copy: what is read may be the memory of others.
            arrays[stage][one.name] = values.to(model.ranks.device, torch.float32, copy=True).view(box.shape)
    for stage, own in arrays.items():
        stage.delayed = {
            one.name: Kept.of(own[FACTOR + one.name], own[HISTORY + one.name]) for one in stage.plan.delayed
        }


def initial_state(model: Model, seed: int) -> State:
    """The state before the first step: initial values made box by box, moments zero."""
    table, first = model.plan.request.table, _first(model.plan)

    def read(name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        if name.startswith(MASTER.prefix):
            name, dtype = owner_of(name), torch_dtype(str(model.plan.request.master_dtype))
        elif name.startswith(STATE):
            return [torch.full(box.shape, first.get(name, 0.0)) for box in boxes]
        else:
            dtype = torch_dtype(model.plan.by_name[name].dtype)
        weight = table.weight(name)
        return [torch.from_numpy(box_values(weight, seed, box)).to(dtype) for box in boxes]

    return make_state(model, read, 0)


def load_state(model: Model, checkpoint: Weights, *, weights_only: bool = False) -> State:
    """The state of a checkpoint, sharded as the plan says, whatever layout and engine wrote it.

    With ``weights_only``, the state before the first step: moments are zero, and those of the checkpoint are not read.
    All ranks call this: what several need is read by one of them.

    Raises CheckpointError for a tensor that is missing, extra, mis-shaped or mis-typed, DamagedError for damaged bytes.
    """
    infos = {info.name: info for info in tensors_of(model.plan)}
    unread = (*STATE, KEPT) if weights_only else ()
    wanted = {
        name: (info.shape, info.dtype) for name, info in infos.items() if not (unread and name.startswith(unread))
    }
    checkpoint.expect(wanted, unread=unread)
    source = _by_all(checkpoint, model)

    first, codes = _first(model.plan), {one.name for one in model.plan.quantized if one.rests}

    def read(name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        if name not in wanted and name.startswith(MASTER.prefix) and owner_of(name) in codes:
            # Made of the weight, which has no memory of its own.
            return [one.to(torch_dtype(infos[name].dtype)) for one in read(owner_of(name), boxes)]
        if name not in wanted:
            return [torch.full(box.shape, first.get(name, 0.0)) for box in boxes]
        dtype = torch_dtype(infos[name].dtype)
        bits = np.dtype(f"<i{dtype.itemsize}") if dtype.itemsize > 1 else np.dtype(np.uint8)
        found = source.read_boxes(name, boxes, raw=True)
        return [torch.from_numpy(np.ascontiguousarray(raw.view(bits))).view(dtype).view(raw.shape) for raw in found]

    state = make_state(model, read, 0 if weights_only else checkpoint.point.step)
    if weights_only and MASTER.prefix in state.kept:
        weights = {key: local_of(one).detach() for key, one in model.parameters().items()}
        parts = {key: part for one in model.updated for key, part in one.own_parts(weights).items()}
        resting = {key for stage in model.stages.values() for key in stage.resting}
        for key, wide in state.kept[MASTER.prefix].items():
            if key not in resting:
                wide.copy_(parts.get(key, weights[key]))
    return state


def _by_all(checkpoint: Weights, model: Model) -> Reads:
    """What all ranks read together."""
    carrier = RankCarrier(device=model.ranks.device)
    if carrier.count == 1:
        return checkpoint
    all_wants = cache(lambda: wants_of_plan(model.plan, lambda device: device))

    def wants(name: str) -> Sequence[Want]:
        found = all_wants().get(saved_as(model.plan, name))
        # What an optimizer has besides, as a count of steps, is not sharded.
        return needed_by_all(checkpoint.tensors[name].shape, carrier.count) if found is None else found

    return Together(source=checkpoint, wants=wants, carrier=carrier)


def tensors_of(plan: Plan) -> tuple[TensorInfo, ...]:
    """Every tensor of a plan's state as a checkpoint stores it, in the table's dims, weights first."""
    resting = {one.name for one in plan.quantized if one.rests}
    updates = {row.name: str(row.updated) for row in plan.weights}
    rows = {
        row.name: TensorInfo(
            name=row.name,
            shape=_shape_at_rest(plan, row.name),
            dtype=row.dtype,
            spec=updates[row.name] if row.name in resting else str(row.at_rest),
        )
        for row in plan.weights
    }
    kept = (
        replace(rows[one.weight], name=one.name, dtype=one.dtype, spec=updates[one.weight])
        for one in kept_tensors(plan)
    )
    own = plan.request.optimizer.shared
    shared = (TensorInfo(name=name, shape=shape, dtype=dtype) for name, (shape, dtype) in own.items())
    delayed = (
        TensorInfo(name=one.name, shape=one.shape, dtype="float32", spec=str(one.spec)) for one in plan.delayed_tensors
    )
    return (*rows.values(), *kept, *shared, *delayed)


def boxes_of(state: State) -> Iterator[OwnedBox]:
    """This rank's boxes; boxes of replicas are only on the first of them.

    All last until the update of the next step, and are copied to the host on call. On a CPU nothing is copied.
    """
    model = state.model
    now = now_on(model.ranks.device)
    plan, ranks = model.plan, model.ranks
    elsewhere = counted_elsewhere(model)
    resting = {key for stage in model.stages.values() for key in stage.resting}
    holder = {one.key: stage for stage in reversed(model.stages.values()) for one in stage.weights}
    for one, parameter in _each(model):
        if one.key in elsewhere:
            continue
        kept = {prefix: arrays[one.key] for prefix, arrays in state.kept.items() if one.key in arrays}
        # What a weight that rests as codes is in its dtype: these follow from it.
        arrays = {"": kept[MASTER.prefix] if one.key in resting else local_of(parameter), **kept}
        for prefix, array in arrays.items():
            in_update = bool(prefix) or one.key in resting
            if not _saves(holder[one.key], one.in_update if in_update else one.at_rest):
                continue
            dtype = array.dtype if prefix else torch_dtype(one.dtype)
            for table_box in _table_boxes(plan, one, ranks, in_update=in_update):
                box = _of_layer(table_box.box, one)
                yield _owned(prefix + one.weight, box, partial(_in_box, array, table_box, box, dtype), now)
    if ranks.rank == 0:
        for name, value in state.shared.items():
            yield _owned(name, Box.whole(tuple(value.shape)), value.detach, now)
    for stage in model.stages.values():
        for row in _frozen(stage.plan):
            assert row.at_rest is not None
            if _saves(stage, row.at_rest):
                yield _owned(row.name, _frozen_box(stage, row.name), stage.frozen[row.name].detach, now)
    own = {one.name for stage in model.stages.values() for one in stage.plan.delayed_tensors if _saves(stage, one.spec)}
    yield from (one for one in delayed_boxes(state) if one.name in own)


def weight_replicas(state: State) -> Iterator[HeldReplica]:
    """This rank's boxes of weights that other ranks hold too, but for those that rest as codes."""
    model = state.model
    now = now_on(model.ranks.device)
    for stage in model.stages.values():
        mesh = stage.plan.mesh
        for one in stage.weights:
            axes = mesh.larger_than_one(one.at_rest.axes)
            if one.key in stage.resting or mesh.size(axes) == mesh.num_devices:
                continue
            array, dtype = local_of(stage.parameters()[one.key]), torch_dtype(one.dtype)
            for table_box in _table_boxes(model.plan, one, model.ranks, in_update=False):
                box = _of_layer(table_box.box, one)
                owned = _owned(one.weight, box, partial(_in_box, array, table_box, box, dtype), now)
                yield HeldReplica(device=model.ranks.rank, axes=" ".join(axes), box=owned)


def _saves(stage: Stage, spec: Spec) -> bool:
    """Whether this rank saves what it has of a tensor of a stage: of replicas the first one does."""
    return saves(spec, stage.plan.mesh, stage.ranks.rank)


def delayed_boxes(state: State) -> Iterator[OwnedBox]:
    """This rank's boxes of what it keeps for delayed amaxes, replicas too."""
    now = now_on(state.model.ranks.device)
    for stage, one, _, stored in _delayed_boxes(state.model):
        kept_of = {FACTOR + name: kept.factor for name, kept in stage.delayed.items()}
        kept_of |= {HISTORY + name: kept.history for name, kept in stage.delayed.items()}
        yield _owned(one.name, stored, kept_of[one.name].detach, now)


def _owned(name: str, box: Box, view: Callable[[], torch.Tensor], now: Moment | None) -> OwnedBox:
    return OwnedBox(
        name=name,
        box=box,
        array=lambda: bits_of(view()),
        lasts="until the update",
        copy=partial(copied_bits, view, now),
    )


def shape_in_update(one: WeightOfLayer, local: torch.Tensor, ranks: Ranks) -> tuple[int, ...]:
    """The shape of what a rank keeps for its local shard of a weight."""
    box = one.update_box(ranks.mesh, ranks.rank)
    if box is not None:
        return box.shape
    return tuple(0 if dim == one.update_dim else size for dim, size in enumerate(local.shape))


def _fill(
    plan: Plan,
    name: str,
    layers: Sequence[tuple[WeightOfLayer, torch.Tensor]],
    ranks: Ranks,
    read: Read,
    *,
    in_update: bool = False,
) -> None:
    """Fills a rank's local shards of all layers of a weight from their boxes in the table's dims, or, ``in_update``, of what is kept for it."""
    places = [(one, local, box) for one, local in layers for box in _table_boxes(plan, one, ranks, in_update=in_update)]
    values = read(name, [_of_layer(box.box, one) for one, _, box in places])
    # Padding is in no box: it is zero.
    for _, local in layers:
        local.zero_()
    for (_, local, table_box), found in zip(places, values, strict=True):
        stored = found.view(table_box.box.shape).permute(table_box.to_stored).reshape(table_box.local_shape)
        local[tuple(slice(*along) for along in table_box.local)] = stored.to(device=local.device, dtype=local.dtype)


def _in_box(array: torch.Tensor, table_box: TableBox, box: Box, dtype: torch.dtype) -> torch.Tensor:
    stored = array.detach()[tuple(slice(*along) for along in table_box.local)].to(dtype)
    return stored.reshape(table_box.shape).permute(table_box.to_table).reshape(box.shape)


def _table_boxes(plan: Plan, one: WeightOfLayer, ranks: Ranks, *, in_update: bool) -> tuple[TableBox, ...]:
    box = one.saved_box(plan.mesh, ranks.rank, in_update=in_update)
    return () if box is None else table_boxes(plan.request.table.weight(one.weight), box)


def _of_layer(box: Box, one: WeightOfLayer) -> Box:
    """The same box of the tensor in which layers are stacked."""
    if one.layer is None:
        return box
    return Box((one.layer, *box.start), (one.layer + 1, *box.stop))


def _each(model: Model) -> Iterator[tuple[WeightOfLayer, torch.Tensor]]:
    parameters = model.parameters()
    return ((one, parameters[one.key]) for one in model.weights)


def _delayed_boxes(model: Model) -> Iterator[tuple[Stage, DelayedTensor, Box, Box]]:
    """What a run keeps for delayed amaxes of each stage, with this rank's box of the stage's tensor, and of a checkpoint's."""
    for stage in model.stages.values():
        for one in stage.plan.delayed_tensors:
            box = shard_box(one.spec, stage.plan.mesh, one.shape, stage.ranks.rank)
            assert box is not None, one.name
            yield stage, one, box, in_stack(box, stage.plan.request.table.weight(one.weight))


def _frozen_box(stage: Stage, name: str) -> Box:
    """The layers that a stage has of what no gradient trains."""
    weight = stage.plan.request.table.weight(name)
    return in_stack(Box.whole(_shape_at_rest(stage.plan, name)), weight)


def _first(plan: Plan) -> Mapping[str, float]:
    """The elements of what a run keeps for delayed amaxes, before the first step."""
    return {one.name: one.first for one in plan.delayed_tensors}


def _frozen(plan: Plan) -> tuple[TensorPlan, ...]:
    return tuple(row for row in plan.weights if plan.request.table.weight(row.name).frozen)


def _shape_at_rest(plan: Plan, name: str) -> tuple[int, ...]:
    """The shape in the table's dims, with layers stacked along a leading dim."""
    weight: Weight = plan.request.table.weight(name)
    return weight.shape if weight.stack is None else (weight.num, *weight.shape)
