"""Recorded MaxText output: the dimensions of its files, and the spec that it resolves for each weight.

``maxtext_facts.json`` was made by running MaxText at the commit that it names, on 64 simulated devices: each configuration
was read by its ``pyconfig``, the model was built abstractly, and the ``NamedSharding`` of every parameter was recorded as
``name/axis/axis`` for each dim, with the axes larger than 1. It has the rules for the names of these weights, and of each file the
keys that are read here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "maxtext_facts.json").read_text(encoding="utf-8"))
DIMS_OF_LAYERS = {"layers", "dense_layers", "moe_layers", "circular_repeats", "layers_per_stage"}

WEIGHTS = {
    "token_embedder/embedding": "embedding.tokens",
    "decoder/logits_dense/kernel": "logits.kernel",
    "decoder/decoder_norm/scale": "residual.final_norm",
    "pre_self_attention_layer_norm/scale": "residual.attention_norm",
    "post_self_attention_layer_norm/scale": "residual.feed_forward_norm",
    "self_attention/query/kernel": "attention.q",
    "self_attention/key/kernel": "attention.k",
    "self_attention/value/kernel": "attention.v",
    "self_attention/out/kernel": "attention.o",
    "self_attention/wq_a/kernel": "attention.q_down",
    "self_attention/q_norm/scale": "attention.q_norm",
    "self_attention/wq_b/kernel": "attention.q_up",
    "self_attention/wkv_a/kernel": "attention.kv_down",
    "self_attention/kv_norm/scale": "attention.kv_norm",
    "self_attention/wkv_b/kernel": "attention.kv_up",
    "shared_experts/wi_0/kernel": "shared.gate",
    "shared_experts/wi_1/kernel": "shared.up",
    "shared_experts/wo/kernel": "shared.down",
    "mlp/wi_0/kernel": "mlp.gate",
    "mlp/wi_1/kernel": "mlp.up",
    "mlp/wo/kernel": "mlp.down",
    "MoeBlock_0/gate/kernel": "router.kernel",
    "MoeBlock_0/gate/bias": "router.bias",
    "MoeBlock_0/wi_0": "moe.gate",
    "MoeBlock_0/wi_1": "moe.up",
    "MoeBlock_0/wo": "moe.down",
}
"""The end of a parameter's path in MaxText to our weight, without its stack."""


def weight_of(path: str, case: str) -> str:
    """Our weight for a path of a case, with its stack, and "(outside)" where it is outside of the pipeline."""
    end = next(end for end in WEIGHTS if path.endswith(end))
    name = WEIGHTS[end]
    if name in ("embedding.tokens", "logits.kernel", "residual.final_norm"):
        return name
    stack = "dense_layers" if "dense_layers" in path else "moe_layers" if case.startswith("deepseek") else "layers"
    return f"{stack}.{name}{' (outside)' if 'outside_pipeline' in path else ''}"


def specs_of(case: str) -> dict[str, str]:
    """The spec that MaxText resolves, by our weight."""
    return {weight_of(path, case): spec for path, spec in FACTS["cases"][case]["weights"].items()}


def write_configs(folder: Path) -> Path:
    """MaxText's configs folder from the recorded data: every file, with the keys that are read and the rules of weights."""
    for name, keys in FACTS["files"].items():
        if not name.startswith("custom_mesh_and_rule/"):
            _write(folder / name, {key: value for key, value in keys.items() if key != "parameters"})
    for name, preset in FACTS["presets"].items():
        _write(folder / "custom_mesh_and_rule" / f"{name}.yml", preset)
    return folder


def _write(path: Path, keys: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rules = keys.get("rules")
    lines = [f"{key}: {json.dumps(value)}" for key, value in keys.items() if key != "rules"]
    if isinstance(rules, int):
        # The tests of this file only need that it has rules.
        rules = [["norm"]]
    if rules is not None:
        lines.append(f"logical_axis_rules: {json.dumps([[name, axes] for name, *axes in rules])}")
    path.write_text("\n".join(lines or ["anything: else"]) + "\n", encoding="utf-8")
