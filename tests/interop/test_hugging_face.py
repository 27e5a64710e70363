"""Hugging Face configs and plans, compared with transformers: parameter counts, and the dims that a plan shards."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers.distributed import tensor_parallel

from shardwright import InputError, Request, make_plan
from shardwright.core.model.table import as_torch_stores
from shardwright.interop.hugging_face.command import nearest_named
from shardwright.interop.hugging_face.importing import HuggingFaceRequest, import_hugging_face
from shardwright.interop.hugging_face.tp_plan import STYLES
from shardwright.models import build

SMALL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK = {
    **SMALL,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=96, rope_parameters=LLAMA3_ROPE
    ),
    "llama-tied": transformers.LlamaConfig(**SMALL, intermediate_size=80, tie_word_embeddings=True, head_dim=32),
    "mixtral": transformers.MixtralConfig(**SMALL, num_key_value_heads=2, intermediate_size=96, num_local_experts=4),
    "deepseek_v3": transformers.DeepseekV3Config(**DEEPSEEK),
    "deepseek_v3-queries-alone": transformers.DeepseekV3Config(**{**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v2": transformers.DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy"),
}
PUBLISHED = {
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
    "deepseek3-671b": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
"""The dimensions of published configs, under the key names of their time."""


def imported(tmp_path, values: Any, **options):
    path = tmp_path / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values, indent=1))
    return import_hugging_face(HuggingFaceRequest(file=str(path), **options))


def parameters_of(config: transformers.PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the trainable parameters of transformers' own model; a tied weight once."""
    name = type(config).__name__.removesuffix("Config") + "ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    return {key: tuple(value.shape) for key, value in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_as_many_parameters_as_in_transformers(name, tmp_path):
    config = CONFIGS[name]
    expected = parameters_of(config)
    count = sum(torch.Size(shape).numel() for shape in expected.values())
    assert imported(tmp_path, config.to_json_string()).table.num_parameters == count


@pytest.mark.parametrize("name", ["llama", "llama-tied", "deepseek_v3"])
def test_each_published_weight_has_its_name_and_shape(name, tmp_path):
    """Except experts, which transformers stores as one tensor."""
    expected = parameters_of(CONFIGS[name])
    table = imported(tmp_path, CONFIGS[name].to_json_string()).table
    ours = {}
    for weight in table.weights:
        if weight.component == "moe" or weight.frozen:
            continue
        for layer in range(weight.first_layer, weight.first_layer + weight.num):
            ours[(weight.hugging_face or "").format(layer=layer)] = as_torch_stores(weight).shape
    assert ours == {key: shape for key, shape in expected.items() if ".mlp.experts." not in key}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_model_of_that_name(name, tmp_path):
    found = imported(tmp_path, PUBLISHED[name])
    assert found.model is not None
    assert found.table.architecture == build(name).architecture
    assert found.table.weights == build(name).weights
    assert nearest_named(found.model) == (name, {})


@pytest.mark.parametrize("name", CONFIGS)
def test_the_command_plans_the_same_model(name, tmp_path):
    found = imported(tmp_path, CONFIGS[name].to_json_string())
    assert found.model is not None
    same = build(*nearest_named(found.model))
    assert (same.architecture, same.weights) == (found.table.architecture, found.table.weights)


def dim_sharded_by_transformers(style: str, dims: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The dim of a stored weight that a style shards, counted from the end: the placement that transformers passes to PyTorch."""
    passed = []

    def distribute(tensor, _mesh, placements, **_):
        passed.extend(placements)
        return tensor

    monkeypatch.setattr(tensor_parallel, "distribute_tensor", distribute)
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(torch.zeros((8,) * dims)))
    tensor_parallel.ALL_PARALLEL_STYLES[style].shard_param(module, "weight", None)
    (placement,) = passed
    return placement.dim if placement.dim < 0 else placement.dim - dims


@pytest.mark.parametrize(
    "config", [transformers.LlamaConfig, transformers.MixtralConfig, transformers.DeepseekV3Config]
)
def test_a_plan_shards_the_dims_that_transformers_shards(config, tmp_path, monkeypatch):
    """Each weight of the plan, as PyTorch stores it, against the dim that the style's own code shards."""
    name = {"LlamaConfig": "llama3-test", "MixtralConfig": "mixtral-test", "DeepseekV3Config": "deepseek3-test"}[
        config.__name__
    ]
    table = build(name)
    found = imported(tmp_path, {"base_model_tp_plan": config.base_model_tp_plan}, model=name)
    assert found.layout is not None
    request = Request(layout=found.layout, table=table, batch=8, length=32, devices=2, engine="torch")
    plan = make_plan(request)
    checked = 0
    for pattern, style in config.base_model_tp_plan.items():
        module = pattern.removeprefix("layers.*.")
        if STYLES[style] == "nothing":
            continue
        for row in plan.weights:
            weight = table.weight(row.name)
            published = weight.hugging_face or ""
            fused = {"mlp.experts.gate_up_proj": ("moe.gate", "moe.up"), "mlp.experts.down_proj": ("moe.down",)}.get(
                module, ()
            )
            if not (published.endswith(f".{module}.weight") and weight.component != "moe") and not row.name.endswith(
                fused or ("?",)
            ):
                continue
            dims = len(row.in_use.dims) - (1 if row.in_use.dims[0].logical_axis == "layers" else 0)
            sharded = row.in_use.dim_of("tensor")
            assert sharded is not None, (pattern, row.name)
            assert sharded - len(row.in_use.dims) == dim_sharded_by_transformers(style, dims, monkeypatch)
            checked += 1
    assert checked >= 7
    untouched = {row.component for row in plan.weights if row.in_use.dim_of("tensor") is None}
    assert "embedding" in untouched


def test_complete_experts_may_be_distributed(tmp_path):
    found = imported(
        tmp_path,
        {"base_model_ep_plan": transformers.MixtralConfig.base_model_ep_plan},
        model="mixtral-test",
    )
    assert found.layout is not None
    assert found.layout.entries["tensor"].roles["moe"] == "expert"
    assert found.layout.entries["tensor"].roles["attention"] == "idle"


def test_a_plan_that_shards_only_some_weights_of_a_component(tmp_path):
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.gate_proj": "rowwise"}
    found = imported(tmp_path, plan, model="llama3-test")
    assert [(finding.code, finding.severity, finding.where) for finding in found.findings] == [
        ("SW123", "error", "'layers.*.self_attn.q_proj' in 'attention'"),
        ("SW123", "error", "'layers.*.mlp.gate_proj' in 'mlp'"),
    ]
    assert found.findings[0].position is not None
    assert found.findings[0].position.line == 2
    assert found.findings[0].found.startswith("attention.q sharded, and attention.k, attention.v and attention.o not:")


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ("{", {}, "{path}:1:2: not JSON: expecting property name enclosed in double quotes."),
        ("[1]", {}, "{path}: a configuration is a JSON object; this is a list."),
        (
            {"a": 1},
            {},
            "{path}: neither a configuration ('model_type' is missing) nor a plan of module patterns and styles.",
        ),
        ({"lm_head": "colwise"}, {}, "{path}: only a plan. Give the model whose weights it shards: --model llama3-8b."),
        (
            {"model_type": "gpt2"},
            {},
            "{path}:2:2: no family here has model_type 'gpt2'. Our tables lack learned embeddings of positions, norms that subtract the "
            "mean, feed-forward layers without a gate and biases. Known: llama, mistral, mixtral, deepseek_v3, deepseek_v2, kimi_k2.",
        ),
        # A name that another program wrote is not misspelt: a similar name is another family.
        (
            {"model_type": "mixtrel"},
            {},
            "{path}:2:2: no family here has model_type 'mixtrel'. Known: llama, mistral, mixtral, deepseek_v3, deepseek_v2, kimi_k2.",
        ),
        (
            {"model_type": "llama", "attention_bias": True},
            {},
            "{path}:3:2: 'attention_bias' is true, and our table of a 'llama' lacks biases.",
        ),
        (
            {"model_type": "llama", "num_attention_heads": None},
            {},
            "{path}:3:2: no 'num_attention_heads', which a model of type 'llama' needs.",
        ),
        (
            {"model_type": "llama", "num_attention_heads": "4", "hidden_size": 64},
            {},
            "{path}:3:2: 'num_attention_heads' is a whole number; found '4'.",
        ),
        (
            {**PUBLISHED["llama3-8b"], "num_key_value_heads": 5},
            {},
            "{path}: num_heads is 32, and must be a multiple of num_kv_heads, which is 5.",
        ),
        (
            {**PUBLISHED["llama3-8b"], "rope_scaling": {"rope_type": "longrope"}},
            {},
            "{path}:11:2: no table of ours has rope_type 'longrope'. Known: default, llama3, yarn.",
        ),
        (
            {**PUBLISHED["mixtral-8x7b"], "tie_word_embeddings": True},
            {},
            "{path}:14:2: 'tie_word_embeddings' is true, and our table of a 'mixtral' lacks logits by the weight of the embedding.",
        ),
        (
            {**PUBLISHED["llama3-8b"], "hidden_size": 4097},
            {},
            "{path}:4:2: 'hidden_size' 4097 is no multiple of the 32 heads, and there is no 'head_dim'.",
        ),
        (
            {**PUBLISHED["llama3-8b"], "rms_norm_eps": "small"},
            {},
            "{path}:9:2: 'rms_norm_eps' is a number; found 'small'.",
        ),
        (
            {**PUBLISHED["llama3-8b"], "tp_plan": 3},
            {},
            "{path}:18:2: 'tp_plan' is an object of module patterns and styles; found 3.",
        ),
    ],
)
def test_what_cannot_be_read(values, options, message, tmp_path):
    with pytest.raises(InputError) as refused:
        imported(tmp_path, values, **options)
    assert str(refused.value).split("\n")[0] == message.format(path=tmp_path / "config.json")


def test_unknown_styles_and_modules(tmp_path):
    found = imported(
        tmp_path, {"layers.*.self_attn.q_proj": "colwize", "layers.*.self_atn.k_proj": "colwise"}, model="llama3-test"
    )
    assert [(finding.code, finding.fix) for finding in found.findings] == [
        ("SW111", "Write 'colwise'."),
        ("SW111", "Write 'self_attn.k_proj'."),
    ]
    assert found.layout is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "hidden_size",
            10**13,
            "'hidden_size' is 10,000,000,000,000, and must be at most 4,294,967,296. Give a smaller dim.",
        ),
        ("num_hidden_layers", 16385, "'num_hidden_layers' is 16,385, and must be at most 16,384. Give fewer layers."),
    ],
)
def test_a_number_above_the_maximum_is_refused_at_its_position(key, value, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {
        "num_attention_heads": 4,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
    lines = ",\n".join(f'"{name}": {number}' for name, number in {**sizes, key: value}.items())
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama",\n{lines}}}')
    with pytest.raises(InputError) as refused:
        import_hugging_face(HuggingFaceRequest(file="config.json"))
    assert str(refused.value).splitlines()[0] == f"config.json:{2 + list(sizes).index(key)}:1: {message}"


@pytest.mark.parametrize(("key", "place"), [("tp_plan", "plan.json:2:1"), (None, "plan.json:1:1")])
def test_a_layout_from_a_plan_has_its_position_in_the_users_file(key, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    styles = (
        '{"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}'
    )
    (tmp_path / "plan.json").write_text(styles if key is None else f'{{\n"{key}": {styles}}}')
    layout = import_hugging_face(HuggingFaceRequest(file="plan.json", model="llama3-test")).layout
    assert layout is not None
    assert str(layout.mesh["tensor"].position) == place
