"""Rotary position embeddings (arXiv:2104.09864), given to a call as the angle of each position and element.

B rows, L tokens, D rotated elements, P = D / 2 pairs.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.modules.attention.arguments import FORMATS
from shardwright.engine_torch.modules.attention.tokens import Sequences, read_lengths


class RotaryPositionEmbedding(nn.Module):
    """The angles of positions, float32 ``[length, 1, 1, dim]``, for ``rotary_pos_emb`` of a call. It has no state, and computes them in each call.

    ``interleaved``: the elements of a pair lie beside each other, otherwise half of the dim apart; give ``rotary_pos_interleaved`` to the
    layer too. ``seq_len_interpolation_factor``: positions are divided by it, and by more where a text is longer than
    ``pretrained_max_position_embeddings`` times it (arXiv:2306.15595).

    >>> RotaryPositionEmbedding(4)(2).flatten(1).tolist()
    [[0.0, 0.0, 0.0, 0.0], [1.0, 0.009999999776482582, 1.0, 0.009999999776482582]]
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if self.dim < 2 or self.dim % 2:
            raise InputError(
                f"RotaryPositionEmbedding: dim={dim} and rotary_percent={rotary_percent} rotate {self.dim} elements, and pairs need an "
                f"even number. Take {max(2, self.dim // 2 * 2)} or {self.dim // 2 * 2 + 2}."
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved
        chosen = torch.get_default_device() if device is None else torch.device(device)
        self.device = torch.device("cpu") if chosen.type == "meta" else chosen

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """``offset``: the position of the first."""
        positions_L = torch.arange(max_seq_len, dtype=torch.float32, device=self.device) + offset
        pretrained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if pretrained is not None and factor is not None:
            longest = pretrained * factor
            positions_L = positions_L * (pretrained / max_seq_len if max_seq_len > longest else 1 / factor)
        exponents_P = torch.arange(0, self.dim, 2, dtype=torch.float32, device=self.device) / self.dim
        angles_LP = positions_L[:, None] * (1.0 / self.rotary_base**exponents_P)
        if self.interleaved:
            angles_LD = angles_LP.repeat_interleave(2, dim=-1)
        else:
            angles_LD = torch.cat([angles_LP, angles_LP], dim=-1)
        return angles_LD[:, None, None]


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Queries or keys rotated by the angles of their positions; elements after the last angle are left as they are.

    ``cu_seqlens``: of all ranks, with padding, for ``thd``. ``cp_rank``: this rank has its two chunks of each sequence. ``start_positions``:
    what is added to positions, for each sequence. ``fused``: changes nothing.

    Raises InputError for fewer angles than positions.

    >>> x = torch.tensor([1.0, 0.0]).expand(2, 1, 1, 2)
    >>> apply_rotary_pos_emb(x, RotaryPositionEmbedding(2)(2))[1].flatten().sub(torch.tensor([1.0, 1.0]).cos()).abs().max() < 0.5
    tensor(True)
    """
    del fused
    if tensor_format not in FORMATS:
        raise InputError(
            f"rotary_pos_emb: tensor_format is {tensor_format!r}; it must be {' or '.join(map(repr, FORMATS))}."
        )
    rows = FORMATS[tensor_format].to_rows(t)
    angles_LD = freqs.flatten(1).to(t.device, computed("rotation", t.dtype))
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or angles_LD.shape[-1] > t.shape[-1] or angles_LD.shape[-1] % 2:
        raise InputError(
            f"rotary_pos_emb is {tuple(freqs.shape)}; it must be [length, 1, 1, dim], of an even dim of at most {t.shape[-1]}."
        )
    positions_BL = _positions(rows, len(freqs), tensor_format == "thd", cu_seqlens, cp_size, cp_rank)
    if start_positions is not None:
        positions_BL = positions_BL + start_positions.to(t.device)[:, None]
    angles_BL1D = angles_LD[positions_BL][:, :, None]
    return FORMATS[tensor_format].from_rows(_rotated(rows, angles_BL1D, interleaved=interleaved))


def _positions(
    rows: torch.Tensor, num_angles: int, packed: bool, cu_seqlens: torch.Tensor | None, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Of each token of this rank in its sequence; one row where all rows have the same."""
    length = rows.shape[1]
    needed = length * cp_size
    if not packed:
        positions_BL = Sequences(rows=1, length=length, device=rows.device).on_rank(cp_rank, cp_size).positions_BL
    else:
        if cu_seqlens is None:
            raise InputError("rotary_pos_emb: 'thd' needs cu_seqlens, which say where each sequence begins.")
        if not torch.compiler.is_compiling():
            bounds = read_lengths(cu_seqlens, "rotary_pos_emb: cu_seqlens")
            needed = max(after - before for before, after in itertools.pairwise(bounds))
        starts = cu_seqlens.to(rows.device, torch.int64)
        packed_rows = Sequences(rows=1, length=length, device=rows.device, starts=starts, lengths=starts.diff())
        # Tokens after the last sequence are padding, and have no position.
        positions_BL = packed_rows.on_rank(cp_rank, cp_size).positions_BL.clamp(max=num_angles - 1)
    if needed > num_angles and not (packed and torch.compiler.is_compiling()):
        raise InputError(
            f"rotary_pos_emb has {num_angles} positions, and the longest sequence {needed} tokens on all ranks. Give "
            f"RotaryPositionEmbedding(dim)({needed}), of entire sequences."
        )
    return positions_BL


def _rotated(x: torch.Tensor, angles: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    wide = x[..., : angles.shape[-1]].to(angles.dtype)
    if interleaved:
        turned = torch.stack([-wide[..., 1::2], wide[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    rotated = (wide * angles.cos() + turned * angles.sin()).to(x.dtype)
    return rotated if angles.shape[-1] == x.shape[-1] else torch.cat([rotated, x[..., angles.shape[-1] :]], dim=-1)
