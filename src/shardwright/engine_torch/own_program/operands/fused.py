"""``nn.MultiheadAttention`` by heads: its one weight of queries, keys and values is sharded by rows, and a shard has rows of heads that another
rank has the rest of.

So the weight is gathered over the axes for each pass, and a rank multiplies with the rows of its own heads: its gradient is reduce-scattered
to the shards. The output projection is sharded along its inputs, and its output is summed over the ranks.

Dims: N rows, L positions of queries, S of keys, E width, H heads of this rank, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from shardwright.core.findings.errors import InputError
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.fsdp_groups import WeightOfLayer

FUSED = functional.multi_head_attention_forward
Axes = tuple[str, ...]


def require_equal_heads(module: nn.Module, weights: Mapping[str, WeightOfLayer], mesh: Mesh) -> None:
    """Raises InputError for a sharded ``nn.MultiheadAttention`` whose heads the axes do not divide, or that has more than heads."""
    for path, owner in module.named_modules():
        if not isinstance(owner, nn.MultiheadAttention):
            continue
        for name, _ in owner.named_parameters():
            full_name = f"{path}.{name}" if path else name
            weight = weights.get(full_name)
            axes = mesh.larger_than_one(weight.in_use.axes) if weight is not None else ()
            if not axes:
                continue
            if owner.bias_k is not None or owner.add_zero_attn:
                raise InputError(
                    f"'{full_name}' is sharded by {' and '.join(axes)} in use, and its nn.MultiheadAttention has add_bias_kv or add_zero_attn, which "
                    f"are of no head. Leave them out, or describe its weights as 'attention: embed_out embed', which are not sharded in use."
                )
            if owner.num_heads % mesh.size(axes):
                raise InputError(
                    f"'{full_name}' is sharded by {' and '.join(axes)}, of {mesh.size(axes)} ranks, which do not divide the {owner.num_heads} "
                    f"heads of its nn.MultiheadAttention. Use a number of ranks that divides them."
                )


def attend_by_heads(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    _embed_dim: int,
    num_heads: int,
    in_proj_weight: DTensor | None,
    in_proj_bias: DTensor | None,
    _bias_k: None,
    _bias_v: None,
    _add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: DTensor,
    out_proj_bias: DTensor | None,
    training: bool = True,
    key_padding_mask: DTensor | None = None,
    need_weights: bool = True,
    attn_mask: DTensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: DTensor | None = None,
    k_proj_weight: DTensor | None = None,
    v_proj_weight: DTensor | None = None,
    static_k: None = None,
    static_v: None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``multi_head_attention_forward`` of PyTorch, whose arguments these are, for weights that are sharded over a mesh."""
    projection = q_proj_weight if use_separate_proj_weight else in_proj_weight
    assert projection is not None
    assert static_k is None, "nn.MultiheadAttention gives none"
    assert static_v is None, "nn.MultiheadAttention gives none"
    heads = _Heads(projection, num_heads)
    batched = query.ndim == 3
    inputs = [heads.input(operand if batched else operand.unsqueeze(1)) for operand in (query, key, value)]
    if use_separate_proj_weight:
        rows = [heads.rows(weight, 1)[0] for weight in (q_proj_weight, k_proj_weight, v_proj_weight)]
    else:
        rows = heads.rows(in_proj_weight, 3)
    biases = heads.rows(in_proj_bias, 3) if in_proj_bias is not None else [None] * 3
    query_NHLD, key_NHSD, value_NHSD = (
        functional.linear(x_LNE, weight, bias).unflatten(-1, (heads.count, -1)).permute(1, 2, 0, 3)
        for x_LNE, weight, bias in zip(inputs, rows, biases, strict=True)
    )
    mask = heads.mask(attn_mask, key_padding_mask, query_NHLD.dtype)
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        is_causal = False
    dropout_p = dropout_p if training else 0.0
    weights_NHLS = None
    if need_weights:
        scores_NHLS = query_NHLD @ key_NHSD.transpose(-1, -2) * query_NHLD.shape[-1] ** -0.5
        weights_NHLS = (scores_NHLS if mask is None else scores_NHLS + mask).softmax(-1)
        weights_NHLS = functional.dropout(weights_NHLS, dropout_p)
        attended_NHLD = weights_NHLS @ value_NHSD
    else:
        attended_NHLD = functional.scaled_dot_product_attention(
            query_NHLD, key_NHSD, value_NHSD, mask, dropout_p, is_causal
        )
    attended_LNE = heads.shared(attended_NHLD.permute(2, 0, 1, 3).flatten(2), 2)
    output = functional.linear(attended_LNE, out_proj_weight, out_proj_bias)
    weights = heads.shared(weights_NHLS, 1) if weights_NHLS is not None else None
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        output, weights = output.squeeze(1), weights.squeeze(0) if weights is not None else None
    return output, weights


class _Heads:
    """The heads of this rank. ``projection``: the weight of queries, sharded over some axes of its mesh."""

    def __init__(self, projection: DTensor, num_heads: int) -> None:
        self.mesh: DeviceMesh = projection.device_mesh
        self.axes = [isinstance(placement, Shard) for placement in projection.placements]
        index, count = 0, 1
        for sharded, size, here in zip(self.axes, self.mesh.shape, self.mesh.get_coordinate() or (), strict=True):
            if sharded:
                index, count = index * size + here, count * size
        self.num_heads, self.count = num_heads, num_heads // count
        self.rows_of_heads = slice(index * self.count, (index + 1) * self.count)

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """What all ranks have. Its gradient here is that of the own heads."""
        assert isinstance(x, DTensor), type(x)
        partial: list[Placement] = [Partial() if sharded else Replicate() for sharded in self.axes]
        return x.redistribute(placements=[Replicate()] * self.mesh.ndim).to_local(grad_placements=partial)

    def rows(self, weight: DTensor | None, parts: int) -> list[torch.Tensor]:
        """The rows of the own heads, of each of the parts of a weight or bias."""
        assert weight is not None
        by_head = self.input(weight).unflatten(0, (parts, self.num_heads, -1))
        return [part.flatten(0, 1) for part in by_head[:, self.rows_of_heads].unbind(0)]

    def mask(self, attn_mask: DTensor | None, padding: DTensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Both masks, to be added to scores."""
        total = None
        if attn_mask is not None:
            total = _added(self.input(attn_mask), dtype)
            total = total.unflatten(0, (-1, self.num_heads))[:, self.rows_of_heads] if total.ndim == 3 else total
        if padding is not None:
            of_keys = _added(self.input(padding), dtype).reshape(-1, 1, 1, padding.shape[-1])
            total = of_keys if total is None else total + of_keys
        return total

    def shared(self, local: torch.Tensor, dim: int) -> DTensor:
        """A tensor of the own heads as part of that of all heads, which lie along a dim."""
        placements = [Shard(dim) if sharded else Replicate() for sharded in self.axes]
        return DTensor.from_local(local, self.mesh, placements, run_check=False)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of booleans, true where no key is attended to, as numbers."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
