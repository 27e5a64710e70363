"""What each key of a configuration is here, held against the classes of transformers."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import transformers

from shardwright.core.findings.errors import InputError
from shardwright.interop.hugging_face.config import model_of
from shardwright.interop.hugging_face.keys import TYPES, PublishedType
from shardwright.interop.hugging_face.missing_parts import MISSING
from shardwright.interop.hugging_face.published import parse_config
from shardwright.interop.hugging_face.rope import DEFAULT_THETA, ROPE_KINDS

WITH_CLASS = {name: kind for name, kind in TYPES.items() if kind.of_class is not None}


def class_of(kind: PublishedType) -> type[transformers.PreTrainedConfig]:
    assert kind.of_class is not None
    return getattr(transformers, kind.of_class)


def defaults_of(kind: PublishedType) -> dict[str, object]:
    """The fields of a class with their defaults, before the class computes any from others."""
    names = class_of(kind).attribute_map
    return {names.get(field.name, field.name): field.default for field in fields(class_of(kind))}


@pytest.mark.parametrize("name", WITH_CLASS)
def test_every_key_of_the_class_is_decided(name: str) -> None:
    kind = WITH_CLASS[name]
    keys = {*vars(class_of(kind)()), *defaults_of(kind)}
    assert sorted(keys - kind.read) == []


@pytest.mark.parametrize("name", WITH_CLASS)
def test_what_a_file_leaves_out_is_as_in_the_class(name: str) -> None:
    kind = WITH_CLASS[name]
    theirs = defaults_of(kind)
    assert kind.defaults == {key: theirs[key] for key in kind.defaults}
    for key, one in kind.training.items():
        assert one.default == theirs.get(key), key
    for key, only in kind.only.items():
        assert key not in theirs or theirs[key] in only.values, key
    assert kind.aliases == class_of(kind).attribute_map
    assert class_of(kind).default_theta == DEFAULT_THETA.get(name, 10_000.0)


@pytest.mark.parametrize("name", TYPES)
def test_a_key_has_one_meaning(name: str) -> None:
    kind = TYPES[name]
    groups = [kind.defaults, kind.training, kind.inert, kind.aliases]
    assert sum(map(len, groups)) == len(set().union(*groups))
    # A key may have a default, and values among which only some are computed.
    assert not {*kind.only} & {*kind.training, *kind.inert, *kind.aliases}


def test_kinds_of_rope_are_those_of_transformers() -> None:
    known = {*transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS, "default", None}
    assert set(ROPE_KINDS) <= known


@pytest.mark.parametrize("name", MISSING)
def test_a_type_that_is_refused_says_what_it_lacks(name: str) -> None:
    assert name not in TYPES
    with pytest.raises(InputError, match="Our tables lack") as refused:
        model_of(parse_config(json.dumps({"model_type": name}), "config.json"))
    assert MISSING[name][0] in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "llama", "hidden_act": "gelu"},
            "config.json:3:2: 'hidden_act' is 'gelu', and our table of a 'llama' lacks feed-forward layers with another function than SiLU.",
        ),
        (
            {"model_type": "deepseek_v3", "moe_layer_freq": 2},
            "config.json:3:2: 'moe_layer_freq' is 2, and our table of a 'deepseek_v3' lacks layers with and without experts in turn.",
        ),
        (
            {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}},
            "config.json:3:2: 'auto_map' is a mapping, and our table of a 'llama' lacks code of its own, in a file beside the weights.",
        ),
        (
            {"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8},
            "config.json:3:2: 'num_experts' is 4, and 'num_local_experts', another name of it, 8. Keep one.",
        ),
        (
            '{"model_type": "qwen3", "time_step_limit": [0.0, Infinity], "x": NaN}',
            "config.json:1:2: no family here has model_type 'qwen3'. Our tables lack norms of queries and keys. Known: llama, mistral, mixtral, "
            "deepseek_v3, deepseek_v2, kimi_k2.",
        ),
        (
            '{"model_type": "llama", "rms_norm_eps": NaN}',
            "config.json:1:25: 'rms_norm_eps' is nan, and must be finite.",
        ),
        (
            {"model_type": "kimi_k2", "vocab_size": 64},
            "config.json: no 'hidden_size', which a model of type 'kimi_k2' needs: transformers has no class with a default.",
        ),
        (
            {"model_type": "mistral", "num_attention_heads": 4},
            "config.json: num_heads is 4, and must be a multiple of num_kv_heads, which is 8. Left out of the file, and as in transformers' "
            "MistralConfig: num_hidden_layers 32, hidden_size 4096, vocab_size 32000, intermediate_size 14336, num_key_value_heads 8, "
            "rms_norm_eps 1e-06, sliding_window 4096.",
        ),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "config.json: window is 0, and must be above 0. Left out of the file",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(config: dict[str, object] | str, message: str) -> None:
    text = config if isinstance(config, str) else json.dumps(config, indent=1)
    with pytest.raises(InputError) as refused:
        model_of(parse_config(text, "config.json"))
    assert str(refused.value).split("\n")[0].startswith(message)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (
            {"model_type": "mixtral", "router_aux_loss_coef": 0.02},
            {
                "router_aux_loss_coef": "0.02: training here lacks the auxiliary loss that balances the experts: nothing does here"
            },
        ),
        ({"model_type": "mixtral", "router_aux_loss_coef": 0.0}, {}),
        (
            {"model_type": "mixtral"},
            {
                "router_aux_loss_coef": "0.001 by default of transformers' MixtralConfig: training here lacks the auxiliary loss that balances "
                "the experts: nothing does here"
            },
        ),
        (
            {"model_type": "deepseek_v2", "num_experts_per_tok": 2, "aux_loss_alpha": 0.001, "seq_aux": True},
            {
                "aux_loss_alpha": "0.001: training here lacks the auxiliary loss that balances the experts: nothing does here",
                "seq_aux": "true: training here lacks an auxiliary loss of each sequence",
            },
        ),
        (
            {"model_type": "llama", "attention_dropout": 0.5, "sliding_window": 6, "my_key": 1},
            {
                "attention_dropout": "0.5: training here lacks dropout of attention",
                "sliding_window": "no key of transformers' LlamaConfig: it is not read",
                "my_key": "no key of transformers' LlamaConfig: it is not read",
            },
        ),
        (
            {"model_type": "llama", "rope_scaling": {"type": "default", "factor": 8.0}},
            {"factor": "'rope_scaling' of its type has no such number: it is not read"},
        ),
    ],
    ids=str,
)
def test_what_changes_only_training_or_is_not_read_is_a_warning(
    config: dict[str, object], found: dict[str, str]
) -> None:
    findings = model_of(parse_config(json.dumps(config), "config.json")).findings
    warnings = {finding.where.strip("'"): finding.found for finding in findings if finding.severity == "warning"}
    assert warnings == found
