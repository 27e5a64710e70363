"""A published ``config.json`` as the dimensions of one of our families.

What changes the computation is in a table of ours or refused; what changes only training is a finding (``besides.py``). ``keys.py`` has
the meaning of each key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from shardwright.core.checks.training_only import training_only_finding
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.faults import shown
from shardwright.core.model.precision import TRAINED_IN
from shardwright.core.model.table import ModelTable
from shardwright.interop.hugging_face.besides import besides, defaults_text, training_only
from shardwright.interop.hugging_face.keys import TYPES, Only, PublishedType
from shardwright.interop.hugging_face.missing_parts import MISSING
from shardwright.interop.hugging_face.published import Published
from shardwright.interop.hugging_face.rope import rope_of
from shardwright.models import FAMILIES
from shardwright.models.deepseek3.sizes import DeepSeek3Config
from shardwright.models.llama3.sizes import Llama3Config
from shardwright.models.mixtral.sizes import MixtralConfig
from shardwright.models.parts.size import Natural, Size

STATED_BY_FILE = ("rope_parameters",)
"""Keys without a default that a file of a type without a class may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of our tables. ``size``: its dimensions, under the names of its family."""

    family: str
    name: str
    size: Size[Any]
    table: ModelTable
    besides: tuple[Finding, ...]
    """Findings about the file that are not of its table."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings about the file."""
        return (*map(training_only_finding, self.table.training_only), *self.besides)


def model_of(published: Published) -> Model:
    """The model of a config.

    Raises InputError for a type that no family has, a dimension that is missing or impossible, and a part that our tables lack.
    """
    kind = _type_of(published)
    stated = replace(published, values=_under_one_name(published, kind))
    for key, only in kind.only.items():
        _refuse_other(stated, key, only)
    filled = replace(stated, values={**kind.defaults, **stated.values})
    readers = {"llama3": _llama, "mixtral": _mixtral, "deepseek3": _deepseek}
    try:
        config = readers[kind.family](filled)
    except InputError as error:
        if str(error).startswith(published.source):
            raise
        defaults = defaults_text(stated, kind)
        more = f" {defaults[0].upper()}{defaults[1:]}." if defaults else ""
        raise InputError(f"{published.source}: {error}{more}") from None
    name = _name(published)
    size = Size(
        config=config,
        natural=_natural(filled, config),
        dtype=_dtype(published),
        training_only=tuple(training_only(stated, kind)),
    )
    return Model(
        family=kind.family,
        name=name,
        size=size,
        table=FAMILIES[kind.family][1](name, size),
        besides=tuple(besides(stated, kind)),
    )


def _type_of(published: Published) -> PublishedType:
    name = published.values.get("model_type")
    if not isinstance(name, str) or name not in TYPES:
        lacks = (
            "" if not isinstance(name, str) or name not in MISSING else f" Our tables lack {_listed(MISSING[name])}."
        )
        published.refuse(
            "model_type", f"no family here has model_type {shown(name)}.{lacks} Known: {', '.join(TYPES)}."
        )
    return TYPES[name]


def _listed(parts: tuple[str, ...]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _under_one_name(published: Published, kind: PublishedType) -> Mapping[str, Any]:
    """The values of a file, with the key of each alias in its place. Refuses a key that is stated twice, and one that must be."""
    values = dict(published.values)
    for alias, key in kind.aliases.items():
        if alias in values:
            if key in values and values[key] != values[alias]:
                published.refuse(
                    alias,
                    f"'{alias}' is {shown(values[alias])}, and '{key}', another name of it, {shown(values[key])}. Keep one.",
                )
            values[key] = values.pop(alias)
    for key, default in kind.defaults.items():
        if kind.of_class is None and default is None and key not in values and key not in STATED_BY_FILE:
            published.refuse(
                key,
                f"no '{key}', which a model of type '{values['model_type']}' needs: transformers has no class with a default.",
            )
    return values


def _refuse_other(published: Published, key: str, only: Only) -> None:
    """Refuses a value that no table of ours computes. It may be missing."""
    if key not in published.values:
        return
    value = published.values[key]
    entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if isinstance(value, dict) and all(isinstance(entry, str) for entry in entries):
        # The name of a repository may come before that of a file.
        entries = [entry.rpartition("--")[2] for entry in entries]
    if any(entry not in only.values for entry in entries):
        kind = published.values["model_type"]
        if only.part:
            published.refuse(key, f"'{key}' is {shown(value)}, and our table of a '{kind}' lacks {only.part}.")
        computed = " and ".join(shown(permitted) for permitted in only.values if permitted is not None)
        published.refuse(key, f"'{key}' is {shown(value)}, and a model of type '{kind}' computes {computed} only.")


def _llama(published: Published) -> Llama3Config:
    heads, embed = published.integer("num_attention_heads"), published.integer("hidden_size")
    return Llama3Config(
        num_layers=published.integer("num_hidden_layers"),
        embed=embed,
        num_heads=heads,
        num_kv_heads=_kv_heads(published, heads),
        head_dim=_head_dim(published, embed, heads),
        window=_window(published),
        mlp=published.integer("intermediate_size"),
        vocab=published.integer("vocab_size"),
        tied=published.flag("tie_word_embeddings"),
        norm_eps=published.number("rms_norm_eps"),
        initializer_stddev=published.number("initializer_range"),
        rope=rope_of(published),
    )


def _mixtral(published: Published) -> MixtralConfig:
    heads, embed = published.integer("num_attention_heads"), published.integer("hidden_size")
    return MixtralConfig(
        num_layers=published.integer("num_hidden_layers"),
        embed=embed,
        num_heads=heads,
        num_kv_heads=_kv_heads(published, heads),
        head_dim=_head_dim(published, embed, heads),
        window=_window(published),
        mlp=published.integer("intermediate_size"),
        num_experts=published.integer("num_local_experts"),
        top_k=published.integer("num_experts_per_tok"),
        vocab=published.integer("vocab_size"),
        norm_eps=published.number("rms_norm_eps"),
        initializer_stddev=published.number("initializer_range"),
        rope=rope_of(published),
    )


def _deepseek(published: Published) -> DeepSeek3Config:
    third = published.values["model_type"] != "deepseek_v2"
    layers = published.integer("num_hidden_layers")
    in_groups = third or published.values["topk_method"] == "group_limited_greedy"
    return DeepSeek3Config(
        num_layers=layers,
        num_dense_layers=min(layers, published.integer("first_k_dense_replace")),
        embed=published.integer("hidden_size"),
        num_heads=published.integer("num_attention_heads"),
        q_lora=None if published.values["q_lora_rank"] is None else published.integer("q_lora_rank"),
        kv_lora=published.integer("kv_lora_rank"),
        nope_dim=published.integer("qk_nope_head_dim"),
        rope_dim=published.integer("qk_rope_head_dim"),
        value_dim=published.integer("v_head_dim"),
        mlp=published.integer("intermediate_size"),
        expert_mlp=published.integer("moe_intermediate_size"),
        num_experts=published.integer("n_routed_experts"),
        num_groups=published.integer("n_group") if in_groups else 1,
        num_chosen_groups=published.integer("topk_group") if in_groups else 1,
        top_k=published.integer("num_experts_per_tok"),
        num_shared_experts=published.integer("n_shared_experts"),
        scoring="sigmoid" if third else "softmax",
        routing_bias=third,
        normalized_weights=third and published.flag("norm_topk_prob"),
        routed_scale=published.number("routed_scaling_factor"),
        vocab=published.integer("vocab_size"),
        norm_eps=published.number("rms_norm_eps"),
        initializer_stddev=published.number("initializer_range"),
        rope=rope_of(published, latent=True, interleaved=published.flag("rope_interleave") if third else True),
    )


def _kv_heads(published: Published, heads: int) -> int:
    return heads if published.values["num_key_value_heads"] is None else published.integer("num_key_value_heads")


def _window(published: Published) -> int | None:
    """As wide as the file has it, for a type whose class reads it."""
    read = "sliding_window" in TYPES[published.values["model_type"]].defaults
    return published.integer("sliding_window") if read and published.values["sliding_window"] is not None else None


def _head_dim(published: Published, embed: int, heads: int) -> int:
    if published.values["head_dim"] is not None:
        return published.integer("head_dim")
    if heads == 0 or embed % heads:
        published.refuse(
            "hidden_size", f"'hidden_size' {embed} is no multiple of the {heads} heads, and there is no 'head_dim'."
        )
    return embed // heads


def _name(published: Published) -> str:
    stated = str(published.values.get("_name_or_path") or "")
    path = Path(stated if stated else published.source)
    name = path.name if stated else (path.resolve().parent.name if path.stem == "config" else path.stem)
    return re.sub(r"[^\w.-]+", "-", name) or "model"


def _dtype(published: Published) -> str:
    stated = published.values.get("dtype") or published.values.get("torch_dtype")
    return str(stated) if stated in TRAINED_IN else "bfloat16"


def _natural(published: Published, config: Any) -> Natural:
    """Eight devices with one row each: `ep` over gcd(8, experts) of them, or `fsdp` without experts."""
    longest = published.values.get("max_position_embeddings")
    length = min(int(longest), 4096) if isinstance(longest, int) and longest > 0 else 4096
    length = min(length, getattr(config, "window", None) or length)
    experts = getattr(config, "num_experts", None)
    if not experts:
        return Natural(layout="fsdp", mesh={"fsdp": 8}, batch=8, length=length)
    ep = gcd(8, experts)
    return Natural(layout="ep", mesh={"data": 1, "fsdp": 8 // ep, "expert": ep}, batch=8, length=length)
