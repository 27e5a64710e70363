"""Token-expert assignments sorted by where they go: the rows that are sent.

X tokens, N assignments that are sent, M embed.
"""

from __future__ import annotations

import torch

from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.dtypes import kept as kept_in


def dispatch_rows(x_XM: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
    """The tokens of assignments, NM. A token's cotangent is the sum over its assignments."""
    return _DispatchedRows.apply(x_XM, token_N)  # pyright: ignore[reportReturnType]


class _DispatchedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_XM: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        ctx.num = x_XM.shape[0]
        ctx.save_for_backward(token_N)
        return x_XM[token_N]

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (token_N,), cotangent_NM = ctx.saved_tensors, cotangents[0]
        wide = computed("cotangent", cotangent_NM.dtype)
        sums_XM = torch.zeros(ctx.num, cotangent_NM.shape[1], dtype=wide, device=cotangent_NM.device)
        return sums_XM.index_add_(0, token_N, cotangent_NM.to(wide)).to(kept_in("cotangent", cotangent_NM.dtype)), None


def count_by_expert(expert: torch.Tensor, experts: int) -> torch.Tensor:
    """The number of assignments of each expert."""
    flat = expert.flatten().long()
    # ``bincount`` would wait on a GPU for the largest number, which is known here.
    return torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))[
        :experts
    ]


def sum_by_token(
    rows_NM: torch.Tensor, token_N: torch.Tensor, tokens: int, *, ends_layer: bool = False
) -> torch.Tensor:
    """Each token's sum of its rows, XM, in their order. Not a matrix product: each token sums a few rows.

    ``ends_layer``: nothing else is read of what comes before it. Then the numbers of tokens are kept under every policy: were they made
    again, all before them would be, exchanges too.
    """
    return _SumByToken.apply(rows_NM, token_N, tokens, ends_layer)  # pyright: ignore[reportReturnType]


class _SumByToken(torch.autograd.Function):
    """The transpose of ``dispatch_rows``. Autograd would keep the rows of ``index_add``, whose gradient does not read them."""

    @staticmethod
    def forward(ctx, rows_NM: torch.Tensor, token_N: torch.Tensor, tokens: int, ends_layer: bool) -> torch.Tensor:
        ctx.token_N = token_N if ends_layer else None
        ctx.save_for_backward(*([] if ends_layer else [token_N]))
        sums_XM = torch.zeros(tokens, rows_NM.shape[1], dtype=rows_NM.dtype, device=rows_NM.device)
        return sums_XM.index_add_(0, token_N, rows_NM)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (token_N,) = ctx.saved_tensors or (ctx.token_N,)
        return cotangents[0][token_N], None, None, None
