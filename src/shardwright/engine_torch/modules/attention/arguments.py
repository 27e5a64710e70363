"""What a call of attention gives, as the sequences of queries and keys; and what it may give by its default only.

B rows, L tokens of queries or of keys in each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.engine_torch.modules.attention.masks import Mask
from shardwright.engine_torch.modules.attention.tokens import Sequences, read_lengths


class Layout(NamedTuple):
    """``to_rows``: from a format to ``[batch, length, ...]``, of which packed sequences are one row."""

    to_rows: Callable[[torch.Tensor], torch.Tensor]
    from_rows: Callable[[torch.Tensor], torch.Tensor]


def _swapped(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


FORMATS: Mapping[str, Layout] = {
    "sbhd": Layout(_swapped, _swapped),
    "bshd": Layout(lambda x: x, lambda x: x),
    "thd": Layout(lambda x: x.unsqueeze(0), lambda x: x.squeeze(0)),
}

_SCORES = "Only masks change scores here"
UNUSED: Mapping[str, tuple[Any, str]] = {
    "core_attention_bias_type": ("no_bias", _SCORES),
    "core_attention_bias": (None, _SCORES),
    "alibi_slopes": (None, f"{_SCORES}. Give rotary_pos_emb for positions"),
    "inference_params": (None, "Keys of earlier calls are not kept: call the module with all tokens"),
    "fp8_output": (False, "The output is in the dtype of the queries"),
    "bf16_backward": (False, "The backward pass is in the dtype of the queries"),
    "num_splits": (1, "Leave it out"),
    "score_mod": (None, _SCORES),
    "score_mod_bprop": (None, _SCORES),
    "score_mod_tensors": (None, _SCORES),
    "score_mod_bprop_tensors": (None, _SCORES),
    "qkv_layer": (None, "Give query_layer, key_layer and value_layer: they may be views of one tensor"),
    "kv_layer": (None, "Give key_layer and value_layer: they may be views of one tensor"),
    "qkv_interleave_dim": (-3, "Give query_layer, key_layer and value_layer"),
}
"""By name: Transformer Engine's default in a call, and what to do instead."""


def refuse_in_call(label: str, arguments: Mapping[str, Any]) -> None:
    """Raises InputError for arguments of a call that are not known, or not computed."""
    for name, value in arguments.items():
        if name not in UNUSED:
            raise InputError(f"{label}: a call has no argument '{name}'. {did_you_mean(name, UNUSED)}")
        default, instead = UNUSED[name]
        if isinstance(value, torch.Tensor) or value != default:
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise InputError(
                f"{label}: {name} is {shown}; it is Transformer Engine's, and is not done here. {instead}."
            )


def sequences_of(
    layout: str,
    rows: tuple[torch.Tensor, torch.Tensor],
    mask: Mask,
    attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    lengths: Mapping[str, torch.Tensor | None],
    num: int,
    label: str,
    pad_between_seqs: bool | None = None,
) -> tuple[Sequences, Sequences]:
    """The sequences of queries and of keys, on each of ``num`` ranks of context parallelism. ``rows``: both as ``[batch, length, ...]``.

    Raises InputError for what does not fit the mask, the format or the ranks.
    """
    packed, (q, k) = layout == "thd", rows
    if packed and not mask.has_padding:
        raise InputError(
            f"{label}: attn_mask_type is '{mask.kind}', and qkv_format 'thd' needs one with 'padding': 'padding' or 'padding_causal'. "
            f"Sequences of other lengths are padding to each other."
        )
    if q.shape[0] != k.shape[0]:
        raise InputError(f"{label}: query_layer has {q.shape[0]} rows, and key_layer {k.shape[0]}.")
    if not packed and num > 1:
        for name, x in (("query_layer", q), ("key_layer", k)):
            if x.shape[1] % 2:
                raise InputError(
                    f"{label}: {name} has {x.shape[1]} tokens of each row, and a rank of context parallelism has two equal chunks of it. "
                    f"Pad rows to a multiple of {2 * num} tokens on all {num} ranks together."
                )
    _require_fitting(mask, attention_mask, lengths, num, label, packed=packed)
    if pad_between_seqs and lengths["cu_seqlens_q_padded"] is None:
        raise InputError(f"{label}: pad_between_seqs=True needs cu_seqlens_q_padded and cu_seqlens_kv_padded.")
    if mask.kind == "arbitrary":
        _require_scores(rows, attention_mask, label)
    masks = (
        _padding_masks(rows, attention_mask, label) if mask.has_padding and attention_mask is not None else (None,) * 2
    )
    sides: list[Sequences] = []
    for side, x, masked in zip(("q", "kv"), rows, masks, strict=True):
        real, padded = (lengths[f"cu_seqlens_{side}{ending}"] for ending in ("", "_padded"))
        sides.append(_sequences(side, x, masked, real, padded, num, label, packed=packed))
    nums = [0 if side.starts is None else len(side.starts) - 1 for side in sides]
    if nums[0] != nums[1]:
        raise InputError(f"{label}: cu_seqlens_q has {nums[0]} sequences, and cu_seqlens_kv {nums[1]}.")
    return sides[0], sides[1]


def _require_fitting(
    mask: Mask,
    attention_mask: object,
    lengths: Mapping[str, torch.Tensor | None],
    num: int,
    label: str,
    *,
    packed: bool,
) -> None:
    """Raises InputError for masks and lengths that are missing, or that the mask would not use."""
    present = [name for name, value in lengths.items() if value is not None]
    if not mask.has_padding and present:
        raise InputError(
            f"{label}: {present[0]} is given, and attn_mask_type '{mask.kind}' has no padding. Give 'padding' or 'padding_causal'."
        )
    if mask.kind == "arbitrary" and (
        not isinstance(attention_mask, torch.Tensor) or attention_mask.dtype != torch.bool
    ):
        raise InputError(
            f"{label}: attn_mask_type 'arbitrary' needs attention_mask, a bool tensor: True is masked out."
        )
    if attention_mask is not None:
        if not mask.has_padding and mask.kind != "arbitrary":
            raise InputError(
                f"{label}: attention_mask is given, and attn_mask_type '{mask.kind}' does not use it. Leave it out, or give 'padding' "
                f"or 'arbitrary'."
            )
        if present or packed:
            raise InputError(
                f"{label}: attention_mask says which tokens are real, and so does cu_seqlens_q. Give cu_seqlens_q only."
            )
        if num > 1:
            raise InputError(
                f"{label}: attention_mask is of rows, and {num} ranks of context parallelism have parts of them. Give cu_seqlens_q and "
                f"cu_seqlens_kv of entire rows, with a mask of '{mask.kind if mask.has_padding else 'padding'}'."
            )
        return
    lacking = [f"cu_seqlens_{side}" for side in ("q", "kv") if lengths[f"cu_seqlens_{side}"] is None]
    if mask.has_padding and lacking:
        raise InputError(
            f"{label}: attn_mask_type '{mask.kind}' needs {' and '.join(lacking)}, or in rows attention_mask."
        )


def _require_scores(rows: tuple[torch.Tensor, torch.Tensor], attention_mask: object, label: str) -> None:
    """Raises InputError for a mask that is not one of scores."""
    q, k = rows
    needed = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    assert isinstance(attention_mask, torch.Tensor)
    shape = tuple(attention_mask.shape)
    if len(shape) != 4 or any(size not in (1, whole) for size, whole in zip(shape, needed, strict=True)):
        raise InputError(
            f"{label}: attention_mask is {shape}; it must be {needed}, or 1 in a dim: rows, heads of a rank, queries, keys."
        )


def _padding_masks(
    rows: tuple[torch.Tensor, torch.Tensor], attention_mask: object, label: str
) -> tuple[torch.Tensor, torch.Tensor]:
    both = attention_mask if isinstance(attention_mask, tuple | list) else (attention_mask,) * 2
    masks = []
    for side, x, masked in zip(("queries", "keys"), rows, both, strict=True):
        needed = (x.shape[0], 1, 1, x.shape[1])
        if not isinstance(masked, torch.Tensor) or masked.dtype != torch.bool or tuple(masked.shape) != needed:
            shown = f"{masked.dtype} {tuple(masked.shape)}" if isinstance(masked, torch.Tensor) else repr(masked)
            raise InputError(
                f"{label}: attention_mask of {side} is {shown}; it must be bool {needed}, True where there is padding. Of queries and "
                f"keys of other lengths give two."
            )
        masks.append(masked[:, 0, 0])
    return masks[0], masks[1]


def _sequences(
    side: str,
    x: torch.Tensor,
    masked_BL: torch.Tensor | None,
    real: torch.Tensor | None,
    padded: torch.Tensor | None,
    num: int,
    label: str,
    *,
    packed: bool,
) -> Sequences:
    rows, length = x.shape[:2]
    if real is None:
        return Sequences(rows=rows, length=length, device=x.device, masked_BL=masked_BL)
    # A compiler cannot trace what is read from the device.
    if not torch.compiler.is_compiling():
        _require_lengths(side, (rows, length), real, padded, num, label, packed=packed)
    lengths = real.to(x.device, torch.int64).diff()
    starts = (real if padded is None else padded).to(x.device, torch.int64) if packed else None
    return Sequences(rows=rows, length=length, device=x.device, starts=starts, lengths=lengths)


def _require_lengths(
    side: str,
    shape: tuple[int, int],
    real: torch.Tensor,
    padded: torch.Tensor | None,
    num: int,
    label: str,
    *,
    packed: bool,
) -> None:
    """Raises InputError for lengths that are not those of the tensors on all ranks."""
    (rows, length), name = shape, f"{label}: cu_seqlens_{side}"
    ends = read_lengths(real, name)
    lengths = [after - before for before, after in itertools.pairwise(ends)]
    if not packed:
        if len(lengths) != rows or max(lengths) > length * num:
            raise InputError(
                f"{name} is {list(ends)}; it must have the lengths of {rows} rows, each at most {length * num}."
            )
        return
    bounds = ends if padded is None else read_lengths(padded, f"{name}_padded")
    spaces = [after - before for before, after in itertools.pairwise(bounds)]
    if len(spaces) != len(lengths) or any(size > space for size, space in zip(lengths, spaces, strict=True)):
        raise InputError(
            f"{name} is {list(ends)}, and {name.rpartition(': ')[2]}_padded {list(bounds)}: a sequence has to fit into its place."
        )
    if num > 1 and (bounds[-1] != length * num or any(space % (2 * num) for space in spaces)):
        raise InputError(
            f"{name}{'_padded' if padded is not None else ''} is {list(bounds)}, and this rank has {length} tokens. Over {num} ranks of "
            f"context parallelism each sequence must be padded to a multiple of {2 * num}, and a rank has {bounds[-1] // num} tokens."
        )
    if bounds[-1] > length * num:
        raise InputError(f"{name} is {list(bounds)}, and there are {length} tokens.")
