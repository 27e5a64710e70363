"""A counter-based random number generator: 64 bits that depend only on a key and an index.

It uses only integer arithmetic modulo 2**64, so every machine and every version of NumPy gives the same bits.
"""

from __future__ import annotations

import hashlib

import numpy as np

Key = tuple[np.uint64, np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def key_of(seed: int, name: str) -> Key:
    """The key of one tensor: 128 bits of a digest, so that no two names or seeds share a stream.

    >>> key_of(0, "embedding") == key_of(0, "embedding"), key_of(0, "embedding") == key_of(1, "embedding")
    (True, False)
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16, person=b"shardwright init").digest()
    return np.uint64(int.from_bytes(digest[:8], "little")), np.uint64(int.from_bytes(digest[8:], "little"))


def scramble(index: np.ndarray, key: Key) -> np.ndarray:
    """Replace each index (uint64) by its 64 random bits, in place; returns the same array.

    The output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014, with the constants of Stafford's variant 13), applied twice, each time after mixing in half of the key.
    Applied once, every tensor would be a section of one and the same cycle.
    """
    assert index.dtype == np.uint64
    index *= _GAMMA
    index += key[0]
    shifted = np.empty_like(index)
    _mix(index, shifted)
    index ^= key[1]
    _mix(index, shifted)
    return index


def _mix(bits: np.ndarray, shifted: np.ndarray) -> None:
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        np.right_shift(bits, shift, out=shifted)
        bits ^= shifted
        if factor is not None:
            bits *= factor
