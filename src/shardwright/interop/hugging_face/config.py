"""A published ``config.json`` as the dimensions of one of our families.

A setting that would change a weight and is not in our tables is refused. One that changes only the computation is a finding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, NoReturn

from shardwright.core.findings.bounds import BOUNDS, number_text
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position
from shardwright.core.layout.faults import shown
from shardwright.core.model.precision import TRAINED_IN
from shardwright.core.model.table import ModelTable
from shardwright.files.json_text import parse_json
from shardwright.files.text import error_at, place_of, read_text
from shardwright.models import FAMILIES
from shardwright.models.deepseek3.sizes import DeepSeek3Config
from shardwright.models.llama3.sizes import Llama3Config
from shardwright.models.mixtral.sizes import MixtralConfig
from shardwright.models.parts.rope import Rope
from shardwright.models.parts.size import Natural, Size

FAMILY = {"llama": "llama3", "mixtral": "mixtral", "deepseek_v3": "deepseek3", "deepseek_v2": "deepseek3"}
"""``model_type`` to our family with the same tensors."""

LAYERS = ("num_hidden_layers", "first_k_dense_replace")
BIASES = ("attention_bias", "mlp_bias")
ROPE_KINDS = {"default": "default", "llama3": "llama3", "yarn": "yarn", None: "default"}
ROUTERS = {
    "deepseek_v2": ("softmax", ("greedy", "group_limited_greedy")),
    "deepseek_v3": ("sigmoid", ("noaux_tc",)),
}
"""How scores are computed, and experts chosen; the first way by default."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
ROPE_NAMES = {
    "theta": "rope_theta",
    "factor": "factor",
    "original_length": ORIGINAL_LENGTH,
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""The published name of each number of ``Rope``."""
ROPE_NEEDS = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
NEAR = 1e-6
"""Of a factor that is written in decimals and also follows from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A config as text and values. ``text``: shown in errors."""

    source: str
    text: str
    values: Mapping[str, Any]

    def place(self, key: str) -> Position | None:
        """The position of a key; None where the file does not have it."""
        found = re.search(rf'"{re.escape(key)}"\s*:', self.text)
        return place_of(self.text, found.start(), self.source) if found else None

    def refuse(self, key: str, message: str) -> NoReturn:
        place = self.place(key)
        if place is None:
            raise InputError(f"{self.source}: {message}")
        raise error_at(message, self.text, place, len(key) + 2)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            self.refuse(key, f"no '{key}', which a model of type '{self.values.get('model_type')}' needs.")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.refuse(key, f"'{key}' is a whole number; found {shown(value)}.")
        bound = BOUNDS["layers" if key in LAYERS else "elements"]
        if value > bound.most:
            self.refuse(key, f"'{key}' is {number_text(value)}, and must be at most {bound.most:,}. {bound.fix}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        value = default if value is None else value
        return _number(self, key, f"'{key}'", value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"'{key}' is true or false; found {shown(value)}.")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of our tables. ``size``: its dimensions, under the names of its family."""

    family: str
    name: str
    size: Size[Any]
    table: ModelTable
    findings: tuple[Finding, ...]


def read_config(path: str) -> Published:
    """A JSON object from a file. Raises InputError for any other content."""
    return parse_config(read_text(path), path)


def parse_config(text: str, path: str) -> Published:
    """The same of a text that came from ``path``."""
    parse_json(text, path)
    values = json.loads(text)
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: a configuration is a JSON object; this is {'a list' if isinstance(values, list) else shown(values)}."
        )
    return Published(source=path, text=text, values=values)


def is_config(published: Published) -> bool:
    """Whether it is a model's configuration, not only a plan."""
    return "model_type" in published.values


def model_of(published: Published) -> Model:
    """The model of a config.

    Raises InputError for a type that no family has, a dimension that is missing or impossible, and biases.
    """
    kind = published.values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILY:
        published.refuse("model_type", f"no family here has model_type {shown(kind)}. Known: {', '.join(FAMILY)}.")
    for key in BIASES:
        if published.values.get(key):
            published.refuse(key, f"'{key}' is true, and no table of ours has biases.")
    family = FAMILY[kind]
    readers = {"llama3": _llama, "mixtral": _mixtral, "deepseek3": _deepseek}
    try:
        config = readers[family](published)
    except InputError as error:
        if str(error).startswith(published.source):
            raise
        raise InputError(f"{published.source}: {error}") from None
    name = _name(published)
    size = Size(config=config, natural=_natural(published, config), dtype=_dtype(published))
    return Model(
        family=family,
        name=name,
        size=size,
        table=FAMILIES[family][1](name, size),
        findings=tuple(_left_out(published)),
    )


def _llama(published: Published) -> Llama3Config:
    heads, embed = published.integer("num_attention_heads"), published.integer("hidden_size")
    return Llama3Config(
        num_layers=published.integer("num_hidden_layers"),
        embed=embed,
        num_heads=heads,
        num_kv_heads=_kv_heads(published, heads),
        head_dim=_head_dim(published, embed, heads),
        mlp=published.integer("intermediate_size"),
        vocab=published.integer("vocab_size"),
        tied=published.flag("tie_word_embeddings", False),
        norm_eps=published.number("rms_norm_eps", 1e-6),
        initializer_stddev=published.number("initializer_range", 0.02),
        rope=_rope(published, 10_000.0),
    )


def _mixtral(published: Published) -> MixtralConfig:
    _refuse_tied(published)
    heads, embed = published.integer("num_attention_heads"), published.integer("hidden_size")
    return MixtralConfig(
        num_layers=published.integer("num_hidden_layers"),
        embed=embed,
        num_heads=heads,
        num_kv_heads=_kv_heads(published, heads),
        head_dim=_head_dim(published, embed, heads),
        mlp=published.integer("intermediate_size"),
        num_experts=published.integer("num_local_experts"),
        top_k=published.integer("num_experts_per_tok"),
        vocab=published.integer("vocab_size"),
        norm_eps=published.number("rms_norm_eps", 1e-5),
        initializer_stddev=published.number("initializer_range", 0.02),
        rope=_rope(published, 1_000_000.0),
    )


def _deepseek(published: Published) -> DeepSeek3Config:
    _refuse_tied(published)
    version_3 = published.values.get("model_type") == "deepseek_v3"
    rank = published.values.get("q_lora_rank")
    scoring, methods = ROUTERS[published.values["model_type"]]
    _refuse_other(published, "scoring_func", (scoring,))
    _refuse_other(published, "topk_method", methods)
    if not version_3:
        # Its class reads neither.
        _refuse_other(published, "norm_topk_prob", (False,))
        _refuse_other(published, "rope_interleave", (True,))
    in_groups = (published.values.get("topk_method") or methods[0]) != "greedy"
    return DeepSeek3Config(
        num_layers=published.integer("num_hidden_layers"),
        num_dense_layers=published.integer("first_k_dense_replace", 0),
        embed=published.integer("hidden_size"),
        num_heads=published.integer("num_attention_heads"),
        q_lora=None if rank is None else published.integer("q_lora_rank"),
        kv_lora=published.integer("kv_lora_rank"),
        nope_dim=published.integer("qk_nope_head_dim"),
        rope_dim=published.integer("qk_rope_head_dim"),
        value_dim=published.integer("v_head_dim"),
        mlp=published.integer("intermediate_size"),
        expert_mlp=published.integer("moe_intermediate_size"),
        num_experts=published.integer("n_routed_experts"),
        num_groups=(in_groups and published.values.get("n_group") and published.integer("n_group")) or 1,
        num_chosen_groups=(in_groups and published.values.get("topk_group") and published.integer("topk_group")) or 1,
        top_k=published.integer("num_experts_per_tok"),
        num_shared_experts=(published.values.get("n_shared_experts") and published.integer("n_shared_experts")) or 0,
        scoring=scoring,
        routing_bias=version_3,
        normalized_weights=version_3 and published.flag("norm_topk_prob", True),
        routed_scale=published.number("routed_scaling_factor", 1.0),
        vocab=published.integer("vocab_size"),
        norm_eps=published.number("rms_norm_eps", 1e-6),
        initializer_stddev=published.number("initializer_range", 0.02),
        rope=_rope(published, 10_000.0, interleaved=published.flag("rope_interleave", True)),
    )


def _refuse_other(published: Published, key: str, known: tuple[object, ...]) -> None:
    """Refuses a value that transformers' class of this type does not compute. It may be missing or null."""
    value = published.values.get(key)
    if value is not None and value not in known:
        published.refuse(
            key,
            f"'{key}' is {shown(value)}, and transformers' class of {published.values['model_type']} computes "
            f"{' and '.join(map(shown, known))} only.",
        )


def _refuse_tied(published: Published) -> None:
    if published.values.get("tie_word_embeddings"):
        published.refuse(
            "tie_word_embeddings", "'tie_word_embeddings' is true, and this family has a separate output head."
        )


def _kv_heads(published: Published, heads: int) -> int:
    return published.integer("num_key_value_heads", heads) if published.values.get("num_key_value_heads") else heads


def _head_dim(published: Published, embed: int, heads: int) -> int:
    if published.values.get("head_dim"):
        return published.integer("head_dim")
    if heads == 0 or embed % heads:
        published.refuse(
            "hidden_size", f"'hidden_size' {embed} is no multiple of the {heads} heads, and there is no 'head_dim'."
        )
    return embed // heads


def _rope(published: Published, theta: float, *, interleaved: bool = False) -> Rope:
    """``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` in earlier configs. What is not there is as in transformers.

    Refuses what our tables have no place for: other positions would be computed.
    """
    key = "rope_parameters" if published.values.get("rope_parameters") else "rope_scaling"
    given = published.values.get(key) or {}
    if not isinstance(given, dict):
        published.refuse(key, f"'{key}' is an object; found {shown(given)}.")
    if nested := next((name for name, value in given.items() if isinstance(value, dict)), None):
        published.refuse(key, f"'{key}' has an entry for '{nested}', and a table of ours has one rope for all layers.")
    kind = given.get("rope_type", given.get("type"))
    if not isinstance(kind, str | None) or kind not in ROPE_KINDS:
        known = [name for name in ROPE_KINDS if name]
        published.refuse(key, f"no table of ours has rope_type {shown(kind)}. Known: {', '.join(known)}.")
    kind = ROPE_KINDS[kind]
    found = dict(given)
    if kind != "default":
        length = published.values.get(ORIGINAL_LENGTH) or given.get(ORIGINAL_LENGTH)
        found[ORIGINAL_LENGTH] = length or published.integer("max_position_embeddings")
    values: dict[str, float] = {}
    for ours, theirs in ROPE_NAMES.items():
        if found.get(theirs) is not None:
            values[ours] = _number(published, key, f"'{theirs}' of '{key}'", found[theirs])
        elif theirs in ROPE_NEEDS.get(kind, ()):
            published.refuse(key, f"'{key}' of type {kind} has no '{theirs}', which it needs.")
    theta = values.pop("theta", 0.0) or published.number("rope_theta", theta)
    length = {"original_length": int(values.pop("original_length"))} if "original_length" in values else {}
    rope = Rope(kind=kind, theta=theta, interleaved=interleaved, **length, **values)  # pyright: ignore[reportArgumentType]
    for name, needed in _unread(given, rope).items():
        if (value := given.get(name, published.values.get(name))) is not None and value != needed:
            published.refuse(
                name,
                f"'{name}' is {shown(value)}, and a rope of type {kind} has {shown(needed)} in our tables.",
            )
    return rope


def _unread(given: Mapping[str, Any], rope: Rope) -> Mapping[str, object]:
    """Values of a rope that our tables do not have, each with the value that they take it to have."""
    taken: dict[str, object] = {"partial_rotary_factor": 1.0}
    if rope.kind == "yarn":
        factor = given.get("attention_factor")
        near = isinstance(factor, int | float) and abs(factor - rope.amplitude) < NEAR
        taken |= {"truncate": True, "attention_factor": factor if near else rope.amplitude}
    return taken


def _number(published: Published, key: str, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        published.refuse(key, f"{name} is a number; found {shown(value)}.")
    try:
        return float(value)
    except OverflowError:
        published.refuse(key, f"{name} is {number_text(value)}, which is more than a number of 64 bits can be.")


def _left_out(published: Published) -> Iterator[Finding]:
    """Settings that our table does not model; they change none of its weights."""
    ignored = {
        "num_nextn_predict_layers": "{} layers for multi-token prediction, which the table omits",
        "sliding_window": "attention over a window of {} tokens, which the table takes as attention over the full row",
        "quantization_config": "quantised weights, which the table takes in a floating-point dtype",
        "attention_dropout": "dropout {}, which is not applied here",
    }
    for key, text in ignored.items():
        value = published.values.get(key)
        if value:
            yield Finding(
                code="SW123",
                severity="info",
                where=f"'{key}'",
                position=published.place(key),
                found=text.format(shown(value)),
                needed="nothing: it changes no weight of the table",
            )
    act = published.values.get("hidden_act", "silu")
    if act != "silu":
        yield Finding(
            code="SW123",
            severity="warning",
            where="'hidden_act'",
            position=published.place("hidden_act"),
            found=f"{shown(act)}, where our feed-forward layers are SwiGLU",
            needed="'silu'",
        )


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
    experts = getattr(config, "num_experts", None)
    if not experts:
        return Natural(layout="fsdp", mesh={"fsdp": 8}, batch=8, length=length)
    ep = gcd(8, experts)
    return Natural(layout="ep", mesh={"data": 1, "fsdp": 8 // ep, "expert": ep}, batch=8, length=length)
