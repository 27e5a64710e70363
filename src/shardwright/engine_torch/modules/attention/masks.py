"""Masks by the names of Transformer Engine: the window of keys that a query attends to, and the diagonal that it follows.

| ``attn_mask_type`` | which tokens | ``window_size`` | the diagonal ends |
|---|---|---|---|
| ``no_mask`` | all | none, or (before, after) | at the last key; with ``bottom_right_diagonal=False`` it begins at the first |
| ``padding`` | the real ones | as ``no_mask`` | as ``no_mask``, of each sequence |
| ``causal``, ``padding_causal`` | all; the real ones | none, or (before, 0) | it begins at the first key |
| ``causal_bottom_right``, ``padding_causal_bottom_right`` | all; the real ones | none, or (before, 0) | at the last key |
| ``arbitrary`` | those where ``attention_mask`` is False | as ``no_mask`` | as ``no_mask`` |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwright.core.findings.errors import InputError

MaskType = Literal[
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
]
MASK_TYPES: tuple[MaskType, ...] = get_args(MaskType)
SPELLINGS = {"padding,causal": "padding_causal", "causal,padding": "padding_causal", "causal_padding": "padding_causal"}
"""Other names of masks."""

Window = tuple[int, int]
ALL: Window = (-1, -1)
CAUSAL: Window = (-1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """``window``: how many keys before the diagonal and after it a query attends to; -1: all. ``bottom_right``: the diagonal ends at the last key."""

    kind: MaskType
    window: Window
    bottom_right: bool

    @property
    def has_padding(self) -> bool:
        return self.kind.startswith("padding")

    @property
    def is_causal(self) -> bool:
        return "causal" in self.kind


def mask_of(kind: object, window_size: object, bottom_right_diagonal: object, label: str) -> Mask:
    """A mask, its window and its diagonal. Raises InputError for names, windows and diagonals that it does not have."""
    kind = SPELLINGS.get(str(kind), kind)
    if kind not in MASK_TYPES:
        raise InputError(f"{label}: attn_mask_type is {kind!r}; it must be one of {', '.join(MASK_TYPES)}.")
    causal = "causal" in kind
    window = _window(kind, window_size, label, causal=causal)
    if bottom_right_diagonal not in (None, True, False):
        raise InputError(
            f"{label}: bottom_right_diagonal is {bottom_right_diagonal!r}; it must be True, False or None."
        )
    needed = kind.endswith("bottom_right") if causal else None
    if needed is not None and bottom_right_diagonal not in (None, needed):
        other = kind.removesuffix("_bottom_right") if needed else f"{kind}_bottom_right"
        raise InputError(
            f"{label}: bottom_right_diagonal={bottom_right_diagonal}, and '{kind}' has {needed}. Leave it out, or give "
            f"attn_mask_type='{other}'."
        )
    bottom_right = needed if needed is not None else bottom_right_diagonal is not False
    return Mask(kind=kind, window=window, bottom_right=bottom_right)


def _window(kind: str, window_size: object, label: str, *, causal: bool) -> Window:
    if window_size is None:
        return CAUSAL if causal else ALL
    if (
        not isinstance(window_size, tuple | list)
        or len(window_size) != 2
        or not all(isinstance(side, int) and not isinstance(side, bool) and side >= -1 for side in window_size)
    ):
        raise InputError(
            f"{label}: window_size is {window_size!r}; it must be two whole numbers: how many keys before a query it attends to, and "
            f"how many after it; -1 is all."
        )
    before, after = window_size
    if causal:
        # Keys that a window has after the query are those that the mask takes away.
        return before, 0
    if (before, after) == CAUSAL:
        raise InputError(
            f"{label}: window_size=(-1, 0) is a causal mask, and attn_mask_type is '{kind}'. Give a causal one, or no window_size."
        )
    return before, after
