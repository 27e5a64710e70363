"""Checkpoints of Transformer Engine: fused weights read and written, as its layers would use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from shardwright.engine_torch.modules import TransformerLayer, from_transformer_engine, to_transformer_engine
from tests.engine_torch.refused_modules import refusal

HEADS, GROUPS, CHANNELS, HIDDEN, UNITS = 4, 2, 3, 8, 6


def layer(**options: Any) -> TransformerLayer:
    chosen: dict[str, Any] = {"fuse_qkv_params": True, "activation": "swiglu", "set_parallel_mode": True, **options}
    return TransformerLayer(
        HIDDEN, UNITS, HEADS, GROUPS, hidden_dropout=0.0, attention_dropout=0.0, kv_channels=CHANNELS, **chosen
    )


def fused_state(ranks: int, decoder: bool) -> list[dict[str, torch.Tensor]]:
    """Of each rank of tp, with the shapes that Transformer Engine's fused layer has there."""
    generator = torch.Generator().manual_seed(ranks)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shared = {"norm": drawn(HIDDEN), "bias": drawn(HIDDEN)}
    found = []
    for _ in range(ranks):
        q, kv = HEADS * CHANNELS // ranks, GROUPS * CHANNELS // ranks
        state: dict[str, Any] = {"self_attention._extra_state": b"a pickle", "layernorm_mlp._extra_state": b""}
        attentions = [("self_attention.layernorm_qkv", q + 2 * kv)]
        if decoder:
            attentions += [("inter_attention.layernorm_query", q), ("inter_attention.key_value", 2 * kv)]
        for name, rows in attentions:
            state |= {f"{name}.weight": drawn(rows, HIDDEN), f"{name}.bias": drawn(rows)}
            if "layernorm" in name:
                state |= {f"{name}.layer_norm_weight": shared["norm"], f"{name}.layer_norm_bias": shared["bias"]}
        for name in ("self_attention", *(["inter_attention"] if decoder else [])):
            state |= {f"{name}.proj.weight": drawn(HIDDEN, q), f"{name}.proj.bias": shared["bias"]}
        mlp = "layernorm_mlp."
        state |= {f"{mlp}layer_norm_weight": shared["norm"], f"{mlp}layer_norm_bias": shared["bias"]}
        state |= {f"{mlp}fc1_weight": drawn(2 * UNITS // ranks, HIDDEN), f"{mlp}fc1_bias": drawn(2 * UNITS // ranks)}
        state |= {f"{mlp}fc2_weight": drawn(HIDDEN, UNITS // ranks), f"{mlp}fc2_bias": shared["bias"]}
        found.append(state)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("decoder", [False, True])
def test_parts_are_what_each_rank_multiplied(ranks: int, *, interleaved: bool, decoder: bool) -> None:
    states = fused_state(ranks, decoder)
    module = layer(qkv_weight_interleaved=interleaved, layer_type="decoder" if decoder else "encoder")
    weights = from_transformer_engine(module, states)
    module.load_state_dict(weights)
    x = torch.randn(5, HIDDEN)
    per = HEADS // GROUPS
    for rank, state in enumerate(states):
        # The output of the fused layer, and the view that attention takes of it.
        name = "self_attention.layernorm_qkv."
        mixed = functional.linear(x, state[f"{name}weight"], state[f"{name}bias"])
        if interleaved:
            q, k, v = mixed.unflatten(-1, (GROUPS // ranks, per + 2, CHANNELS)).split([per, 1, 1], dim=-2)
        else:
            q, k, v = mixed.unflatten(-1, (per + 2, GROUPS // ranks, CHANNELS)).split([per, 1, 1], dim=-3)
        for part, needed in (("query", q), ("key", k), ("value", v)):
            entire = functional.linear(x, weights[f"{name}{part}_weight"], weights[f"{name}{part}_bias"])
            torch.testing.assert_close(entire.chunk(ranks, dim=-1)[rank], needed.flatten(1))
        hidden = functional.linear(x, state["layernorm_mlp.fc1_weight"], state["layernorm_mlp.fc1_bias"])
        gate, up = hidden.chunk(2, dim=-1)
        for part, needed in (("fc1_gate", gate), ("fc1", up)):
            of_part = (weights[f"layernorm_mlp.{part}_{kind}"] for kind in ("weight", "bias"))
            torch.testing.assert_close(functional.linear(x, *of_part).chunk(ranks, dim=-1)[rank], needed)
        if decoder:
            name = "inter_attention.key_value."
            mixed = functional.linear(x, state[f"{name}weight"], state[f"{name}bias"])
            shape = (GROUPS // ranks, 2 * CHANNELS) if interleaved else (2 * GROUPS // ranks, CHANNELS)
            k, v = mixed.unflatten(-1, shape).chunk(2, dim=-1 if interleaved else -2)
            for part, needed in (("key", k), ("value", v)):
                entire = functional.linear(x, weights[f"{name}{part}_weight"], weights[f"{name}{part}_bias"])
                torch.testing.assert_close(entire.chunk(ranks, dim=-1)[rank], needed.flatten(1))
    if ranks == 1:
        back = to_transformer_engine(module, module.state_dict())
        for name, tensor in back.items():
            assert torch.equal(tensor, states[0][name]), name
        assert {name for name in states[0] if not name.endswith("_extra_state")} == back.keys()


def test_a_checkpoint_of_another_form_is_refused() -> None:
    states = fused_state(2, decoder=False)
    assert refusal(lambda: from_transformer_engine(layer(), states[0])) == (
        "'self_attention.layernorm_qkv.weight' of the checkpoint has 12 rows, and self_attention.layernorm_qkv.query_weight, "
        "self_attention.layernorm_qkv.key_weight, self_attention.layernorm_qkv.value_weight have 24 on one of 1 ranks. Give the checkpoint of "
        "every rank of tp, in their order."
    )
    assert refusal(lambda: from_transformer_engine(layer(fuse_qkv_params=False, bias=False), states)).startswith(
        "the checkpoint lacks self_attention.layernorm_qkv.key_weight, "
    )
