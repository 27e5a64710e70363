"""Random configurations of the accepted types, and what both engines and transformers compute of each.

    python -m tests.interop.drawn_configs --count 2000 --seed 0

Keys are deleted, changed and added. transformers reads the file, draws weights and saves them; both engines read those as a run does. A
configuration is accepted where it is read and a plan of its rows has no error, and then every logit is within ``TOLERANCE``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.core.plan.plan import Plan
from shardwright.interop.hugging_face.config import model_of
from shardwright.interop.hugging_face.keys import TYPES
from shardwright.interop.hugging_face.published import read_config
from shardwright.interop.hugging_face.weights.direct import open_model_folder
from tests.engine_jax.logits import our_logits as jax_logits
from tests.engine_torch.logits import our_logits as torch_logits
from tests.engine_torch.logits import plan_of_one_rank

ROWS, LENGTH = 2, 20
TOLERANCE = 1e-4
"""Of a logit, absolute, in float32."""
MOST_PARAMETERS = 4_000_000
"""A class's own dimensions take the place of deleted ones; larger models are drawn again."""

GROUPED: dict[str, list[Any]] = {
    "hidden_size": [32, 48],
    "num_attention_heads": [4, 2],
    "num_key_value_heads": [2, 1, 4, None],
    "head_dim": [8, 16, None],
    "vocab_size": [64],
    "num_hidden_layers": [1, 2],
    "intermediate_size": [24, 40],
    "rms_norm_eps": [1e-5, 1e-6, 0.1],
    "initializer_range": [0.02],
    "max_position_embeddings": [64, 4096],
    "hidden_act": ["silu", "silu", "silu", "silu", "swish", "gelu", "relu", "gelu_new", None],
    "tie_word_embeddings": [False, False, True],
    "attention_bias": [False, False, False, True],
    "attention_dropout": [0.0, 0.1],
}
SCALINGS: list[Any] = [
    {"rope_theta": 100.0},
    {"rope_theta": 1e4, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    {"rope_parameters": {"rope_theta": 50.0}, "rope_theta": 70.0},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta": 100.0},
    {"rope_scaling": {"factor": 4.0}, "rope_theta": 100.0},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "beta_fast": 8, "beta_slow": 2}},
    {
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 8,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
        "rope_theta": 1000,
    },
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.3}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 8}},
    {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 8}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8}},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "rope_theta": 100.0,
    },
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "mscale_all_dim": 1.0,
            "rope_theta": 100.0,
        },
    },
    {"rope_parameters": {"rope_theta": 50.0}, "rope_scaling": {"type": "yarn", "factor": 2.0, "rope_theta": 90.0}},
    {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_theta": 100.0, "mscale_all_dim": 1.0}},
    {},
]
EXPERTS = {
    "num_local_experts": [4, 3],
    "num_experts_per_tok": [2, 1],
    "router_aux_loss_coef": [0.0, 0.02],
    "output_router_logits": [False, True],
    "router_jitter_noise": [0.0, 0.1],
}
LATENT: dict[str, list[Any]] = {
    **{key: values for key, values in GROUPED.items() if key not in ("head_dim", "tie_word_embeddings")},
    "num_key_value_heads": [4, 2, None, 128],
    "tie_word_embeddings": [False, False, False, True],
    "q_lora_rank": [12, None],
    "kv_lora_rank": [8, 16],
    "qk_nope_head_dim": [8, 4],
    "qk_rope_head_dim": [8, 4],
    "v_head_dim": [8, 12],
    "moe_intermediate_size": [8],
    "n_routed_experts": [8, 16],
    "n_shared_experts": [1, 2],
    "num_experts_per_tok": [2, 3],
    "n_group": [4, 2, 1, None],
    "topk_group": [2, 1, None],
    "first_k_dense_replace": [0, 1, 1, 2],
    "routed_scaling_factor": [1.0, 2.5, 16.0],
    "moe_layer_freq": [1, 1, 1, 2],
    "aux_loss_alpha": [0.001, 0.0],
    "seq_aux": [True, False],
    "norm_topk_prob": [True, False, None],
}
STATED: Mapping[str, dict[str, list[Any]]] = {
    "llama": {**GROUPED, "mlp_bias": [False, False, True], "pretraining_tp": [1, 2]},
    "mistral": {**GROUPED, "sliding_window": [None, LENGTH, 4096, 6]},
    "mixtral": {**GROUPED, **EXPERTS, "sliding_window": [None, LENGTH, 4096, 6]},
    "deepseek_v3": {
        **LATENT,
        "scoring_func": ["sigmoid", "sigmoid", "softmax"],
        "topk_method": ["noaux_tc", "noaux_tc", "greedy"],
        "rope_interleave": [True, False, None],
        "num_nextn_predict_layers": [0, 1],
    },
    "deepseek_v2": {
        **LATENT,
        "scoring_func": ["softmax", "softmax", "sigmoid"],
        "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
        "norm_topk_prob": [False, False, True, None],
        "mlp_bias": [False, False, True],
    },
}
"""The keys of each type, with values among which the first is the most usual."""
ADDED: dict[str, list[Any]] = {
    "sliding_window": [6, None, 4096],
    "use_sliding_window": [False],
    "attention_bias": [True, False],
    "mlp_bias": [True],
    "layer_types": [["full_attention"], ["sliding_attention"], None],
    "num_experts": [4, 8],
    "num_local_experts": [4, 8],
    "head_dim": [8, 64],
    "qk_head_dim": [7],
    "rope_theta": [30.0],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [8],
    "norm_topk_prob": [True],
    "scoring_func": ["sigmoid"],
    "routed_scaling_factor": [3.0],
    "rope_interleave": [True, False],
    "moe_layer_freq": [2],
    "use_qk_norm": [True],
    "logits_scaling": [3.0],
    "final_logit_softcapping": [30.0],
    "embedding_multiplier": [2.0],
    "num_nextn_predict_layers": [1],
    "ep_size": [8],
    "pad_token_id": [0, 3],
    "use_cache": [False],
    "pretraining_tp": [2],
    "architectures": [["LlamaForCausalLM"]],
    "auto_map": [{"AutoModelForCausalLM": "modeling_mine.Mine"}],
    "torch_dtype": ["bfloat16", "float32"],
    "chunk_size_feed_forward": [2],
    "num_mtp_layers": [0],
    "my_own_key": [float("inf"), float("nan"), "x"],
    "router_jitter_noise": [0.1],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``outcome``: refused, plan, too large, theirs (transformers computes nothing), equal or different. ``why``: of it, in a line."""

    values: Mapping[str, Any]
    outcome: str
    why: str = ""
    difference: float = 0.0


def drawn(random: np.random.Generator) -> dict[str, Any]:
    """A configuration as an object of JSON: a usual one of a type, of which keys are deleted, changed and added."""

    def pick(values: list[Any]) -> Any:
        return values[random.integers(len(values))]

    kind = pick(list(TYPES))
    stated = STATED["deepseek_v3" if kind == "kimi_k2" else kind]
    changing = random.random() < 0.8
    values = {
        key: pick(choices) if changing and random.random() < 0.15 else choices[0] for key, choices in stated.items()
    }
    values |= pick(SCALINGS) if random.random() < 0.7 else {}
    for key in list(values):
        if random.random() < 0.05:
            del values[key]
    for key in random.choice(list(ADDED), random.integers(0, 2), replace=False) if changing else ():
        values[str(key)] = pick(ADDED[str(key)])
    return {"model_type": kind, **values}


def compared(
    values: Mapping[str, Any], folder: Path, random: np.random.Generator, *, on_jax: bool = True
) -> Comparison:
    """A configuration in a folder of its own, compared."""
    path = folder / "config.json"
    path.write_text(json.dumps(values, indent=1))
    try:
        table = model_of(read_config(str(path))).table
    except InputError as error:
        return Comparison(values=values, outcome="refused", why=str(error).splitlines()[0].removeprefix(f"{path}:"))
    if table.num_parameters > MOST_PARAMETERS:
        return Comparison(values=values, outcome="too large")
    plan = plan_of_one_rank(table, ROWS, LENGTH)
    if plan.errors:
        return Comparison(values=values, outcome="plan", why=plan.errors[0].found)
    tokens = random.integers(0, table.sizes["vocab"], (ROWS, LENGTH))
    try:
        theirs = _theirs(values, folder, tokens, int(random.integers(2**31)))
    except Exception as error:
        return Comparison(values=values, outcome="theirs", why=f"{type(error).__name__}: {error}".splitlines()[0])
    weights = _weights(plan, folder)
    ours = {"PyTorch": torch_logits(plan, weights, {"tokens": tokens})}
    if on_jax:
        ours["JAX"] = jax_logits(table, weights, {"tokens": tokens})
    differences = {engine: np.abs(logits - theirs).max() for engine, logits in ours.items()}
    engine, worst = max(differences.items(), key=lambda item: np.nan_to_num(item[1], nan=np.inf))
    return Comparison(
        values=values,
        outcome="equal" if worst <= TOLERANCE else "different",
        why=engine,
        difference=float(worst),
    )


def _theirs(values: Mapping[str, Any], folder: Path, tokens: np.ndarray, seed: int) -> np.ndarray:
    """Logits of transformers by its own reading of the file, on weights that it saves beside it."""
    read = folder / "theirs"
    read.mkdir()
    # No class is called so; its files have the class of DeepSeek-V3 beside them.
    kind = "deepseek_v3" if values["model_type"] == "kimi_k2" else values["model_type"]
    (read / "config.json").write_text(json.dumps({**values, "model_type": kind}))
    config = transformers.AutoConfig.from_pretrained(read)
    config.dtype = torch.float32
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # Logits are near 1, so that the bound is far above what float32 rounds.
    alone = not config.tie_word_embeddings
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.2)
            elif name.endswith("correction_bias"):
                tensor.normal_(0.0, 0.1)
            elif "rotary_emb" not in name:
                tensor.normal_(0.0, 1.0 if "embed" in name and alone else tensor.shape[-1] ** -0.5)
        logits = model(torch.from_numpy(tokens)).logits.float().numpy()
    model.save_pretrained(read)
    (read / "model.safetensors").rename(folder / "model.safetensors")
    return logits


def _weights(plan: Plan, folder: Path) -> dict[str, np.ndarray]:
    """All weights under our names, as a run reads them from the folder."""
    opened = open_model_folder(folder, plan)
    assert opened is not None
    weights, _ = opened
    arrays = {}
    for name, tensor in weights.tensors.items():
        box = Box((0,) * len(tensor.shape), tensor.shape)
        (arrays[name],) = weights.read_boxes(name, [box])
    return arrays


def comparisons(count: int, seed: int, every_on_jax: int = 1) -> list[Comparison]:
    """``count`` configurations that are not too large, with what became of each. Compiled for JAX is each ``every_on_jax``-th."""
    results: list[Comparison] = []
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        number = 0
        while len(results) < count:
            random = np.random.default_rng([seed, number])
            with tempfile.TemporaryDirectory() as folder:
                result = compared(drawn(random), Path(folder), random, on_jax=number % every_on_jax == 0)
            number += 1
            if result.outcome != "too large":
                results.append(result)
                if len(results) % 100 == 0:
                    counts = Counter(result.outcome for result in results)
                    print(f"{len(results):,} of {count:,}: {dict(counts)}", file=sys.stderr, flush=True)
    finally:
        dist.destroy_process_group()
    return results


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--refusals", action="store_true", help="print each refusal with its number")
    options = parser.parse_args(arguments)
    # A program of one configuration runs once: JAX reads this when it compiles the first.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    start = time.monotonic()
    results = comparisons(options.count, options.seed)
    outcomes = Counter(result.outcome for result in results)
    worst = max((result.difference for result in results if result.outcome == "equal"), default=0.0)
    for result in results:
        if result.outcome == "different":
            print(f"{result.difference:.3g} ({result.why}): {json.dumps(result.values)}")
    for outcome in ("refused", "plan", "theirs") if options.refusals else ("theirs",):
        reasons = Counter(result.why[:140] for result in results if result.outcome == outcome)
        for reason, number in reasons.most_common():
            print(f"{outcome:>8} {number:4}  {reason}")
    accepted = Counter(result.values["model_type"] for result in results if result.outcome in ("equal", "different"))
    print(
        f"{len(results):,} configurations in {time.monotonic() - start:.0f} s: {outcomes['refused']:,} refused when read, "
        f"{outcomes['plan']:,} by the plan, {outcomes['theirs']:,} that transformers does not compute; {accepted.total():,} accepted "
        f"({', '.join(f'{kind} {number}' for kind, number in sorted(accepted.items()))}), of which {outcomes['different']:,} differ by more "
        f"than {TOLERANCE}; the others by {worst:.1e} at most"
    )
    return 1 if outcomes["different"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
