"""Layers of a transformer for users' own programs, against plain PyTorch and a published layer: alone, and on ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from shardwright.engine_torch.modules import RotaryPositionEmbedding, TransformerLayer
from tests.engine_torch.attention_cases import largest_difference
from tests.engine_torch.layer_cases import drawn_layer
from tests.engine_torch.module_cases import FIRST_STEPS, Alone, ModuleCase, after_loads, against_one_process
from tests.engine_torch.own_layers import Parallel, alone, differences_of_layers
from tests.engine_torch.own_modules import DELAYED, LAYERED, trained
from tests.engine_torch.ranks import Ranks
from tests.matrix import rest


@pytest.mark.parametrize("seeds", [range(25), rest(range(25, 400))], ids=["some", "many"])
def test_a_drawn_layer_is_that_of_plain_pytorch(seeds: range) -> None:
    for seed in seeds:
        assert alone(seed, checkpoint_core_attention=seed % 3 == 0) <= 1, drawn_layer(seed)


CASES = (
    Parallel(tp=2),
    Parallel(tp=2, sequence=True),
    Parallel(context=2, communication="all_gather"),
    Parallel(context=2, communication="p2p"),
    Parallel(context=2, communication="a2a"),
    Parallel(context=4, communication="all_gather"),
    Parallel(context=4, communication="p2p"),
    Parallel(context=4, communication="a2a"),
    Parallel(tp=2, sequence=True, context=2, communication="all_gather"),
    Parallel(tp=2, sequence=True, context=2, communication="p2p"),
    Parallel(tp=2, sequence=True, context=2, communication="a2a"),
    Parallel(tp=4, sequence=True),
)


@pytest.mark.parametrize(
    ("parallel", "seeds"),
    [(case, range(3)) if case.tp * case.context == 4 else rest(case, range(3)) for case in CASES]
    + [rest(case, range(3, 40)) for case in CASES],
    ids=str,
)
def test_ranks_compute_what_plain_pytorch_does(four: Ranks, parallel: Parallel, seeds: range) -> None:
    ranks = four.first(parallel.tp * parallel.context)
    for rank, found in enumerate(ranks.run(differences_of_layers, seeds, parallel)):
        for seed, difference in zip(seeds, found, strict=True):
            assert difference <= 1, (rank, drawn_layer(seed, context=parallel.context, tp=parallel.tp))


LOADED = {
    ModuleCase(LAYERED, None, "tp-sp"): "fsdp",
    ModuleCase(LAYERED, "mxfp8", "tp"): "hsdp",
    ModuleCase(LAYERED, DELAYED, "hsdp"): "tp-sp",
    ModuleCase(LAYERED, "fp8-row", "fsdp"): "tp-sp",
}
"""A model with a layer, and the mesh that loads what was saved."""


@pytest.mark.parametrize("case", [case if case.recipe is None else rest(case) for case in LOADED], ids=str)
def test_a_mesh_trains_it_as_one_process_does_and_another_loads_it(
    four: Ranks, one: Ranks, case: ModuleCase, tmp_path: Path
) -> None:
    """Made on ``meta`` there, and in memory in one process: initial values are equal, and so are those of the other mesh."""
    ranks = four.run(trained, case.kind, case.model, case.recipe, str(tmp_path), True, FIRST_STEPS)
    for number, apart in enumerate(against_one_process(case, ranks, Alone(one))):
        assert apart.share <= 1, (number, apart)
    apart = after_loads(case, [LOADED[case]], ranks, four, tmp_path)
    assert apart.share <= 1, apart


LLAMA: Mapping[str, str] = {
    "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.layernorm_qkv.query_weight": "self_attn.q_proj.weight",
    "self_attention.layernorm_qkv.key_weight": "self_attn.k_proj.weight",
    "self_attention.layernorm_qkv.value_weight": "self_attn.v_proj.weight",
    "self_attention.proj.weight": "self_attn.o_proj.weight",
    "layernorm_mlp.layer_norm_weight": "post_attention_layernorm.weight",
    "layernorm_mlp.fc1_gate_weight": "mlp.gate_proj.weight",
    "layernorm_mlp.fc1_weight": "mlp.up_proj.weight",
    "layernorm_mlp.fc2_weight": "mlp.down_proj.weight",
}
"""Names of a published layer."""


@pytest.mark.parametrize("layout", ["bshd", rest("sbhd")])
def test_a_layer_is_that_of_llama_as_published(layout: str) -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(4)
    config = LlamaConfig(hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2)
    config._attn_implementation = "eager"
    theirs = LlamaDecoderLayer(config, 0)
    ours = TransformerLayer(
        48,
        80,
        6,
        2,
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attn_input_format=layout,  # pyright: ignore[reportArgumentType]
    )
    for one in theirs.parameters():
        torch.nn.init.normal_(one, std=0.3)
    published = theirs.state_dict()
    ours.load_state_dict({name: published[other] for name, other in LLAMA.items()})
    x = torch.randn(2, 11, 48)
    leaves = x.clone().requires_grad_(), x.clone().requires_grad_()
    positions = torch.arange(11)[None]
    mask = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    needed = theirs(leaves[0], attention_mask=mask, position_embeddings=LlamaRotaryEmbedding(config)(x, positions))
    swap = layout == "sbhd"
    found = ours(leaves[1].transpose(0, 1) if swap else leaves[1], rotary_pos_emb=RotaryPositionEmbedding(8)(11))
    found = found.transpose(0, 1) if swap else found
    cotangent = torch.randn_like(found)
    needed.backward(cotangent)
    found.backward(cotangent)
    pairs = [(found, needed), (leaves[1].grad, leaves[0].grad)]
    pairs += [(ours.get_parameter(name).grad, theirs.get_parameter(other).grad) for name, other in LLAMA.items()]
    mine, right = zip(*pairs, strict=True)
    assert largest_difference([x.detach() for x in mine], [x.detach() for x in right]) < 1e-5
