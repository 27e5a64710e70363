"""The digests of a box. It is hashed in pieces, so that a range of it is verified without the rest."""

from __future__ import annotations

import numpy as np
import xxhash

PIECE_BYTES = 1 << 20
"""Bytes of a piece in new checkpoints. The last piece of a box is shorter."""
MAX_PIECE_BYTES = 1 << 30
"""A piece is read at once."""
DIGEST_BYTES = 16


def digest_of(data: object) -> str:
    """XXH3, 128 bits, in hex, of bytes or a contiguous array."""
    return xxhash.xxh3_128_hexdigest(data)  # pyright: ignore[reportArgumentType]


class PieceHasher:
    """Hashes the bytes of one box, which may come in chunks of any size."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._hasher, self._filled = xxhash.xxh3_128(), 0
        self._digests = bytearray()

    def update(self, chunk: memoryview) -> None:
        """``chunk``: contiguous bytes."""
        start = 0
        while start < len(chunk):
            taken = chunk[start : start + self._piece_bytes - self._filled]
            self._hasher.update(taken)
            self._filled += len(taken)
            start += len(taken)
            if self._filled == self._piece_bytes:
                self._end_piece()

    def digests(self) -> np.ndarray:
        """The digests of all pieces: uint8 (pieces, 16). No chunk may follow."""
        if self._filled:
            self._end_piece()
        return np.frombuffer(self._digests, np.uint8).reshape(-1, DIGEST_BYTES)

    def _end_piece(self) -> None:
        self._digests += self._hasher.digest()
        self._hasher.reset()
        self._filled = 0


def first_mismatch(data: memoryview, digests: np.ndarray, piece_bytes: int) -> int | None:
    """The first piece of ``data`` that does not match its digest, or None. ``data`` begins at the first piece of ``digests``."""
    needed = digests.tobytes()
    for number in range(len(digests)):
        piece = data[number * piece_bytes : (number + 1) * piece_bytes]
        if xxhash.xxh3_128_digest(piece) != needed[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            return number
    return None
