"""Reproducible rows, and the order in which head-tail balancing shards a row over devices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

LENGTH = 32

ENDS = ([LENGTH], [], [3], [5, 6, LENGTH], [LENGTH - 7], [11, LENGTH], [1, 20], [30, LENGTH])
"""Where the documents of a row end; what follows the last is padding."""

Batch = Mapping[str, np.ndarray]


def tokens_of(step: int, rows: int, vocab: int = 2048) -> Batch:
    """Rows of a step, with very different numbers of valid tokens. Each kind of row has another index in every step.

    One row is only padding, one almost only, the others have one, two or three documents. In every fourth step, from the
    second on, the first half of the rows is padding: for any number of devices that shard the rows, one has no token.
    Tokens follow Zipf's law, so that there is something to learn.
    """
    rng = np.random.default_rng([step, rows])
    shape = (rows, LENGTH)
    positions, segments, valid = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for row in range(rows):
        if step % 4 == 1 and row < rows // 2:
            continue
        start = 0
        for number, end in enumerate(ENDS[(row + step) % min(rows, len(ENDS))]):
            positions[row, start:end] = np.arange(end - start)
            segments[row, start:end] = number + 1
            valid[row, start : end - 1] = True
            start = end
    words = np.minimum(rng.zipf(1.3, (rows, LENGTH + 1)), vocab) - 1
    tokens, targets = words[:, :-1].astype(np.int32), words[:, 1:].astype(np.int32)
    return {"tokens": tokens, "targets": targets, "positions": positions, "segments": segments, "valid": valid}


def head_tail(length: int, devices: int) -> np.ndarray:
    """The positions in the text of the tokens of a balanced row, in the order in which ``devices`` shard it.

    The row is divided into twice as many chunks as devices. Each device has one from the head and the opposite one from the
    tail, so that all have the same work under a causal mask.

    >>> head_tail(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    chunks = np.arange(length).reshape(2 * devices, -1)
    order = [chunk for device in range(devices) for chunk in (device, 2 * devices - 1 - device)]
    return chunks[order].reshape(-1)
