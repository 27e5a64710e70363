"""Compares the tensors a program expects with those of a checkpoint: names, shapes and dtypes must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.checkpoint.format.manifest import TensorInfo
from shardwright.core.findings.nearest import nearest


def mismatches(found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[Sequence[int], str]]) -> list[str]:
    """One line with both values for each tensor that does not match; an empty list if all match.

    >>> weight = TensorInfo(name="w_up", shape=(4, 8), dtype="float32")
    >>> mismatches({"w_up": weight}, {"w_up": ((4, 8), "bfloat16")})
    ["'w_up': dtype: found float32, needed bfloat16"]
    >>> mismatches({"w_up": weight}, {"wup": ((4, 8), "float32")})
    ["'wup': missing; the checkpoint has 'w_up'", "'w_up': extra, float32 (4, 8), which this run does not have"]
    """
    extra = [name for name in found if name not in expected]
    lines: list[str] = []
    for name, (shape, dtype) in expected.items():
        info = found.get(name)
        if info is None:
            near = nearest(name, extra)
            lines.append(f"'{name}': missing" + (f"; the checkpoint has '{near}'" if near else ""))
            continue
        if info.shape != tuple(shape):
            lines.append(f"'{name}': shape: found {info.shape}, needed {tuple(shape)}")
        if info.dtype != dtype:
            lines.append(f"'{name}': dtype: found {info.dtype}, needed {dtype}")
    lines += [
        f"'{name}': extra, {found[name].dtype} {found[name].shape}, which this run does not have" for name in extra
    ]
    return lines
