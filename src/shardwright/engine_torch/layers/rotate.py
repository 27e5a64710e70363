"""Rotary position embeddings (arXiv:2104.09864); frequencies and scalings come from the model's ``Rope``.

B rows, L tokens, H heads, D rotated elements, P = D / 2 pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardwright.engine_torch.io.dtypes import computed, kept
from shardwright.models.parts.rope import Rope


class Angles(NamedTuple):
    """Cosine and sine for each token and pair, in float32."""

    cos_BLP: torch.Tensor
    sin_BLP: torch.Tensor


def angles(rope: Rope, dim: int, positions_BL: torch.Tensor) -> Angles:
    """The rotation of tokens at the given positions of their documents."""
    frequencies_P = torch.tensor(rope.inverse_frequencies(dim), dtype=torch.float32, device=positions_BL.device)
    angle_BLP = positions_BL[..., None].float() * frequencies_P
    return Angles(torch.cos(angle_BLP) * rope.amplitude, torch.sin(angle_BLP) * rope.amplitude)


def rotate(x: torch.Tensor, rotation: Angles, interleaved: bool) -> torch.Tensor:
    """``x``, BLHD or BLD, with each pair rotated. The result has the first elements of all pairs, then the second ones.

    So interleaved pairs do not stay interleaved, which does not change products of queries and keys that are both rotated here.
    """
    x_BLHD = x if x.dim() == 4 else x[:, :, None]
    wide = x_BLHD.to(computed("rotation", x.dtype))
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    cos, sin = rotation.cos_BLP[:, :, None, :], rotation.sin_BLP[:, :, None, :]
    rotated = torch.cat([(first * cos).sub_(second * sin), (second * cos).add_(first * sin)], dim=-1)
    rotated = rotated.to(kept("rotation", x.dtype))
    return rotated if x.dim() == 4 else rotated[:, :, 0]
