"""Random bits that are a function of a key and a counter: Threefry-2x32 of 20 rounds, which JAX has built in.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. It has only sums, shifts and exclusive ors of
32 bits, so every device computes the same bits.
"""

from __future__ import annotations

import torch

Words = tuple[torch.Tensor, torch.Tensor]
"""64 bits as two int32."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(key: Words, first: torch.Tensor, second: torch.Tensor) -> Words:
    """The bits of each counter, whose two words have one shape or broadcast. All are int32; their sums wrap around."""
    first, second = torch.broadcast_tensors(first, second)
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = first + keys[0], second + keys[1]
    for four in range(5):
        for by in _ROTATIONS[four % 2]:
            x += y
            # A shift to the right copies the sign.
            high = (y >> (32 - by)).bitwise_and_((1 << by) - 1)
            y = (y << by).bitwise_or_(high).bitwise_xor_(x)
        x += keys[(four + 1) % 3]
        y += keys[(four + 2) % 3] + (four + 1)
    return x, y
