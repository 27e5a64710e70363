"""Random bits that are a function of a key and a counter: Threefry-2x32 of 20 rounds.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. It has only sums, shifts and exclusive ors of
32 bits, so every device computes the same bits. JAX has it built in; PyTorch's operations are in ``engine_torch``.

| key | of |
|---|---|
| a digest of the use and the weight's name | (the run's seed, as two words) |
| that | (step, layer) |
| that | (row of the operand, pair of its columns): 64 bits, 32 for each column |
"""

from __future__ import annotations

import hashlib

from shardwright.core.recipes.hadamard import SIZES, padded_to

Words = tuple[int, int]
"""64 bits, the two words of 32 bits each."""

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
MASK = 0xFFFFFFFF

ROUNDING_BITS = 24
"""Of the 32 random bits of an element, those that round it."""


def threefry(key: Words, counter: Words) -> Words:
    """
    >>> [hex(word) for word in threefry((0, 0), (0, 0))]
    ['0x6b200159', '0x99ba4efe']
    """
    keys = (*key, key[0] ^ key[1] ^ PARITY)
    x, y = (counter[0] + key[0]) & MASK, (counter[1] + key[1]) & MASK
    for four in range(5):
        for by in ROTATIONS[four % 2]:
            x = (x + y) & MASK
            y = ((y << by) | (y >> (32 - by))) & MASK ^ x
        x = (x + keys[(four + 1) % 3]) & MASK
        y = (y + keys[(four + 2) % 3] + four + 1) & MASK
    return x, y


def words_of(number: int) -> Words:
    """A number below 2^64.

    >>> words_of(2**32 + 7)
    (7, 1)
    """
    return number & MASK, number >> 32


def key_of(use: str) -> Words:
    """The key of a use of random bits, as the rounding of one operand: 64 bits of a digest."""
    digest = hashlib.blake2b(use.encode(), digest_size=8, person=b"shardwright use").digest()
    return words_of(int.from_bytes(digest, "little"))


def rounding_of(product: str, operand: str, weight: str) -> Words:
    """The key of the rounding of an operand."""
    return key_of(f"rounding of {operand} for {product} of {weight}")


SIGNS = key_of("signs of the Hadamard transform")
"""Of which the 64 bits are the signs of all transforms of a run, in every step."""


def stride_of(length: int) -> int:
    """The difference of the first counters of two rows of tokens: so large that a row may be filled up for a transform."""
    return padded_to(length, max(SIZES))
