"""The positions and the router of a ``config.json``, as transformers' own classes read it; what they compute otherwise is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardwright.core.findings.errors import InputError
from shardwright.interop.hugging_face.config import model_of
from shardwright.interop.hugging_face.published import parse_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v2",
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(config: dict[str, Any]) -> Any:
    return model_of(parse_config(json.dumps(config), "config.json")).size.config


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.138629436}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": True, "partial_rotary_factor": 1}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}, "rope_theta": 500.0},
    ],
    ids=json.dumps,
)
def test_what_is_missing_is_as_in_transformers(rope: dict[str, Any]) -> None:
    config = {"rope_theta": 1e4, **LLAMA, **rope}
    theirs: Any = transformers.LlamaConfig(**json.loads(json.dumps(config)))
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, "cpu")
    ours = read(config).rope
    np.testing.assert_allclose(ours.inverse_frequencies(32), frequencies.numpy(), rtol=1e-5)
    assert ours.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'rope_scaling' of type llama3 has no 'low_freq_factor'"),
        ({"rope_scaling": {"type": "yarn"}}, "'rope_scaling' of type yarn has no 'factor', which it needs."),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.3}},
            "'attention_factor' is 1.3, and a rope of type yarn has 1.138629436",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}},
            "'truncate' is false, and a rope of type yarn has true in our tables.",
        ),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5, and a rope of type default has 1.0"),
        ({"rope_parameters": {"full": {"rope_type": "yarn"}}}, "one rope for all layers"),
        ({"rope_parameters": {"rope_theta": "x"}}, "'rope_theta' of 'rope_parameters' is a number; found 'x'."),
        ({"rope_theta": 10**400}, "'rope_theta' is above 10^20, which is more than a number of 64 bits can be."),
    ],
    ids=str,
)
def test_positions_that_no_table_has(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read({**LLAMA, **values})


def test_experts_are_chosen_as_the_class_does() -> None:
    """Without 'group_limited_greedy', it does not look at the groups that the configuration has."""
    assert [read({**DEEPSEEK, "topk_method": method}).num_groups for method in (None, "greedy")] == [1, 1]
    found = read({**DEEPSEEK, "topk_method": "group_limited_greedy"})
    assert (found.num_groups, found.num_chosen_groups) == (4, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm_topk_prob": True}, "'norm_topk_prob' is true, and a model of type 'deepseek_v2' computes false only"),
        ({"scoring_func": "sigmoid"}, "computes 'softmax' only"),
        ({"topk_method": "noaux_tc"}, "computes 'greedy' and 'group_limited_greedy' only"),
        ({"rope_interleave": False}, "'rope_interleave' is false"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "computes 'sigmoid' only"),
    ],
    ids=str,
)
def test_routers_that_the_class_does_not_compute(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read({**DEEPSEEK, **values})
