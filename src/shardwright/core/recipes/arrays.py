"""The functions of arrays that the formula of a quantizer needs besides ``+ - * & |``, shifts and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """These functions of an engine. None of them changes a bit that the other engine's does not.

    ``float32(x)``: exact, of a narrower float, of codes or of an integer below 2**24. ``int32(x)``: of a byte or a bool, and of a float from 0
    to 2**31, towards 0.
    ``bits(x)``: those of float32 as int32, and ``of_bits`` the inverse. ``quotient(x, y)``: rounded once, as IEEE 754
    does; one may be a number.
    ``least`` and ``most`` of two, of which one may be a number: NaN if one is NaN. ``largest(x, dims)``: of int32 from 0
    over dims, which stay with size 1; 0 of none. ``padded(x, dim, size)``: with zeros at its end, up to this size; ``first(x, dim, size)``: only so
    many from the start. ``joined(x, y)``: along their last dim. ``cast(x, dtype)``: float32 within the format's range to its codes, to the nearest, ties to even.
    ``fused(function)``: a function of a module, which an engine may compute in one pass over its first argument.
    ``in_rows(x)``: whether neighbours along the last dim are neighbours in memory; then its blocks and what follows from them are one pass.
    ``bytes_of(x)``: those of codes, uint8; ``as_bytes(x)``: uint8, or int32 below 256, as bytes, row after row; ``as_codes(x, dtype)``: bytes as
    codes with these bits.
    """

    float32: Callable[[Any], Any]
    int32: Callable[[Any], Any]
    bits: Callable[[Any], Any]
    of_bits: Callable[[Any], Any]
    quotient: Callable[[Any, Any], Any]
    least: Callable[[Any, Any], Any]
    most: Callable[[Any, Any], Any]
    where: Callable[[Any, Any, Any], Any]
    largest: Callable[[Any, tuple[int, ...]], Any]
    reshape: Callable[[Any, Sequence[int]], Any]
    padded: Callable[[Any, int, int], Any]
    first: Callable[[Any, int, int], Any]
    joined: Callable[[Any, Any], Any]
    cast: Callable[[Any, str], Any]
    bytes_of: Callable[[Any], Any]
    as_bytes: Callable[[Any], Any]
    as_codes: Callable[[Any, str], Any]
    in_rows: Callable[[Any], bool]
    fused: Callable[[Callable[..., Any]], Callable[..., Any]]
