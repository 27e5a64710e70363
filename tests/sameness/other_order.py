"""The same numbers, summed in another order, on one device: the difference that law 3 allows between two layouts in bfloat16.

A layout divides sums. Where `tensor` shards the contracted dim of a product, each device rounds its partial result to the dtype
of the computation, and these are summed in that dtype. Where tokens are sharded, each device rounds its partial gradient of a
weight once, and these are summed in the dtype at rest. In a ring, queries attend to one shard of the keys after the other. Here one
device does the same: every product of a step, forward and backward, is divided into random parts of its contracted dim, and
attention takes chunks of the keys.

Products of float32 keep their order in bfloat16, whose rounding is far above their last bits. Under a recipe of low precision they
are divided too: the products of quantized operands are summed in float32, and a last bit may decide between two codes. The tokens of
an expert come in another order then, as a layout may bring them: their blocks, the groups of their transforms, and their random numbers
follow from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.engine_torch.attention import attend as attention
from shardwright.engine_torch.attention.scores import AttentionMask, OnlineSoftmax, accumulate_attention, normalized
from shardwright.engine_torch.experts import experts
from shardwright.engine_torch.io.private import imagined_ranks
from shardwright.layouts import load_layout
from tests.engine_jax.made_rows import Batch
from tests.engine_jax.steps import Run
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import trained_on

PARTS = 4
"""The parts of every sum: as many as the devices that share one in most of the layouts tested."""

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


class Here(Ranks):
    """This process as the only rank of a group."""

    def __init__(self) -> None:
        super().__init__(1, lambda *_: imagined_ranks(1))

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float | None = None) -> list[Any]:
        del limit_s
        with imagined_ranks(1):
            return [function(*arguments)]


def runs(request: Request, batches: Sequence[Batch], seed: int, orders: int) -> list[Run]:
    """The first steps of a request's model on one device of PyTorch, in the order of the program and in ``orders`` others.

    ``batches``: rows in the order of the text. ``seed``: of the initial values.
    """
    plan = make_plan(
        replace(
            request,
            layout=load_layout("fsdp"),
            mesh_sizes={"fsdp": 1},
            devices=None,
            engine="torch",
            remat="none",
            microbatches=1,
            load_balanced=False,
        )
    )
    assert not plan.errors, plan.errors
    found = [trained_on(Here(), plan, batches, seed).run]
    for number in range(orders):
        with in_another_order(number, request.batch * request.length, wide=request.precision is not None):
            found.append(trained_on(Here(), plan, batches, seed).run)
    return found


@contextmanager
def in_another_order(seed: int, tokens: int, *, wide: bool = False) -> Iterator[None]:
    """A context for one order. ``tokens``: of the batch. A product that sums over so many elements is the gradient of a weight.
    ``wide``: products of float32 are divided too, and the tokens of an expert come in another order."""
    attend, swiglu = attention.attend, experts.grouped_swiglu
    attention.attend = _attend_in_chunks
    if wide:
        experts.grouped_swiglu = partial(_of_rows_in_another_order, swiglu, torch.Generator().manual_seed(seed))
    try:
        with _Parts(seed, tokens, wide=wide):
            yield
    finally:
        attention.attend, experts.grouped_swiglu = attend, swiglu


def _of_rows_in_another_order(
    swiglu: Callable[..., torch.Tensor],
    dice: torch.Generator,
    rows_RM: torch.Tensor,
    matrices: Any,
    sizes_E: torch.Tensor,
    *more: Any,
) -> torch.Tensor:
    ends = sizes_E.cumsum(0).tolist()
    order = [
        end - size + torch.randperm(size, generator=dice) for end, size in zip(ends, sizes_E.tolist(), strict=True)
    ]
    order_R = torch.cat([*order, torch.arange(ends[-1], rows_RM.shape[0])])
    return swiglu(rows_RM[order_R], matrices, sizes_E, *more)[order_R.argsort()]


class _Parts(TorchDispatchMode):
    def __init__(self, seed: int, tokens: int, *, wide: bool) -> None:
        super().__init__()
        self._dice, self._tokens, self._wide = random.Random(seed), tokens, wide

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in PRODUCTS or (args[0].dtype == torch.float32 and not self._wide) or not args[0].shape[-1]:
            return func(*args, **(kwargs or {}))
        x, y = args
        over = x.shape[-1]
        where = list(range(over))
        self._dice.shuffle(where)
        parts = [
            func(x[..., chosen], y[..., chosen, :])
            for part in range(PARTS)
            if (chosen := where[part * over // PARTS : (part + 1) * over // PARTS])
        ]
        if over == self._tokens:
            return sum(part.float() for part in parts).to(x.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        return sum(parts[1:], parts[0])


def _attend_in_chunks(
    q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKE: torch.Tensor, mask: AttentionMask, scale: float
) -> torch.Tensor:
    softmax: OnlineSoftmax | None = None
    size = k_BSKD.shape[1] // PARTS
    for start in range(0, k_BSKD.shape[1], size):
        keys = slice(start, start + size)
        of_keys = mask._replace(
            kv_positions_BS=mask.kv_positions_BS[:, keys], kv_segments_BS=mask.kv_segments_BS[:, keys]
        )
        softmax = accumulate_attention(softmax, q_BTHD, k_BSKD[:, keys], v_BSKE[:, keys], of_keys, scale)
    assert softmax is not None
    return normalized(softmax, q_BTHD.dtype)
