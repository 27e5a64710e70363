"""An optimizer of ``torch.optim`` by its name there: its state by the names of a checkpoint, found by a few steps of small
tensors, and its update of a rank's local shards.

It is made anew for each step, of the shards and of the state that is kept: so the state has one place, as that of every optimizer.
A rank has shards only, one for each layer. So each element must be computed by itself, which a trial shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwright.core.findings.errors import InputError
from shardwright.core.model.optimizer import Optimizer
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.training.named import OURS, PREFIX, constants_of, kept_of, no_such, other_shape, refused

Shards = Mapping[str, torch.Tensor]

SET_HERE = ("foreach", "fused", "capturable", "differentiable")
"""How a step is computed: one tensor after the other, so that it needs no second copy of all of them."""

SIZES = (2, 3, 5, 7, 11)
"""Dims of the small tensors. No two are equal, so that state of another shape is seen."""
STEPS = 3


def described(
    name: str, settings: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], stacked: Collection[str] = ()
) -> Optimizer:
    """The optimizer ``torch:name`` with its state. ``shapes``: of the trained weights; those in ``stacked`` have layers as dim 0, of
    which the optimizer gets one at a time.

    Raises InputError for a name or a constant that PyTorch has not, for state that is neither a scalar nor of a weight's
    shape, and for an update that is not computed element by element.
    """
    made = _class(name)
    parameters = inspect.signature(made).parameters
    constants = constants_of(f"torch:{name}", settings, parameters, given=SET_HERE)
    optimizer = Optimizer(name=f"torch:{name}", constants=constants)
    numbers_of_dims = sorted({min(len(shape) - (key in stacked), len(SIZES)) for key, shape in shapes.items()} | {2})
    try:
        states = [_tried(optimizer, [_drawn(SIZES[:dims])])[1][0] for dims in numbers_of_dims]
        full, _ = _tried(optimizer, [_drawn((4, 6))])
        halves, _ = _tried(optimizer, list(_drawn((4, 6)).split(2)))
    # A user's choice runs here: whatever it raises is about the choice.
    except Exception as error:
        raise refused(optimizer, error) from None
    owners: dict[tuple[str, str], Iterable[str]] = {}
    shared: dict[str, tuple[tuple[int, ...], str]] = {}
    for dims, state in zip(numbers_of_dims, states, strict=True):
        for key, value in state.items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
            if shape is None or (shape not in (SIZES[:dims], ())) or _dtype(value) not in DTYPE_BYTES:
                raise other_shape(optimizer.name, key, shape or (), ("a weight", SIZES[:dims]))
            if shape == ():
                shared[PREFIX + key] = ((), _dtype(value))
            else:
                owners[f"{PREFIX}{key}/", _dtype(value)] = shapes
    if not torch.allclose(full[0], torch.cat(halves), rtol=1e-5, atol=1e-7):
        raise InputError(
            f"--optimizer {optimizer.name}: it computes the elements of a weight together, and a rank has only its shard of "
            f"each. {OURS}"
        )
    return Optimizer(name=optimizer.name, constants=constants, kept=kept_of(owners, shapes), shared=shared)


def change(
    optimizer: Optimizer,
    weights: Shards,
    gradients: Shards,
    kept: Mapping[str, dict[str, torch.Tensor]],
    shared: dict[str, torch.Tensor],
    rate: float,
) -> None:
    """One step of a rank's shards, in place, and of what is kept for them. Nothing is kept before the first step."""
    names = [one.prefix for one in optimizer.kept]
    shards = list(weights.values())
    for key, shard in weights.items():
        shard.grad = gradients[key]
    made = _made(optimizer, shards, rate)
    for key, shard in weights.items():
        if shared or any(kept[prefix] for prefix in names):
            made.state[shard] = {
                **{prefix.removeprefix(PREFIX).removesuffix("/"): kept[prefix][key] for prefix in names},
                # Each has its own: a step counts in place.
                **{name.removeprefix(PREFIX): value.clone() for name, value in shared.items()},
            }
    made.step()
    for key, shard in weights.items():
        shard.grad = None
        for prefix in names:
            kept[prefix][key] = made.state[shard][prefix.removeprefix(PREFIX).removesuffix("/")]
    for name in optimizer.shared:
        shared[name] = made.state[shards[0]][name.removeprefix(PREFIX)]


def _class(name: str) -> type[torch.optim.Optimizer]:
    found: Any = getattr(torch.optim, name, None)
    if not _is_optimizer(found):
        raise no_such("torch", name, [one for one in dir(torch.optim) if _is_optimizer(getattr(torch.optim, one))])
    return found


def _is_optimizer(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer


def _made(optimizer: Optimizer, tensors: Sequence[torch.Tensor], rate: float) -> torch.optim.Optimizer:
    """The optimizer with this learning rate. Its own weight decay is 0: a run's is decoupled, the same for all optimizers."""
    made: Any = _class(optimizer.name.partition(":")[2])
    parameters = inspect.signature(made).parameters
    own = {"weight_decay": 0.0, "foreach": False}
    return made(
        list(tensors),
        lr=rate,
        **{name: value for name, value in own.items() if name in parameters},
        **dict(optimizer.constants),
    )


def _tried(optimizer: Optimizer, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Mapping[str, Any]]]:
    """Tensors after a few steps, and what the optimizer keeps for each. All have gradients of one drawn tensor's parts."""
    values = [tensor.clone() for tensor in tensors]
    made = _made(optimizer, values, 0.1)
    for step in range(STEPS):
        total = sum(value.shape[0] for value in values)
        gradient = _drawn((total, *values[0].shape[1:]), step + 1)
        for value, part in zip(values, gradient.split([value.shape[0] for value in values]), strict=True):
            value.grad = part.clone()
        made.step()
    return values, [{key: found for key, found in made.state[value].items() if found is not None} for value in values]


def _drawn(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
