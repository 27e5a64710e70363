"""The configuration of an exported folder: as it was published, except for what its weights no longer are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwright.interop.hugging_face.weights.files.quantized import QUANTIZED

OF_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
DTYPE_KEYS = ("dtype", "torch_dtype")


def exported_config(text: str, dtype: str, fp8_block: tuple[int, int] | None = None) -> tuple[str, tuple[str, ...]]:
    """The text of a configuration for weights of a floating-point dtype, and what was changed, one phrase each. ``fp8_block``: of
    matrices in FP8, rows and columns that have one scale.

    A reader would dequantise weights again, and cast them, as the configuration says. A text that is right stays as it is.

    >>> exported_config('{"torch_dtype": "bfloat16", "quantization_config": {}}', "float32")[1]
    ("without 'quantization_config'", "'torch_dtype' float32")
    """
    values: Mapping[str, Any] = json.loads(text)
    stated = [key for key in DTYPE_KEYS if isinstance(values.get(key), str) and values[key] != dtype]
    changed = [f"'{key}' {dtype}" for key in stated]
    added = {}
    if fp8_block is None and QUANTIZED in values:
        changed.insert(0, f"without '{QUANTIZED}'")
    elif fp8_block is not None and QUANTIZED not in values:
        added = {QUANTIZED: {**OF_FP8, "weight_block_size": list(fp8_block)}}
        changed.insert(0, f"with '{QUANTIZED}'")
    if not changed:
        return text, ()
    dropped = QUANTIZED if fp8_block is None else None
    kept = {key: dtype if key in stated else value for key, value in values.items() if key != dropped} | added
    return json.dumps(kept, indent=2, ensure_ascii=False) + "\n", tuple(changed)
