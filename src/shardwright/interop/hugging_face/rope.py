"""The rope of a published configuration. What our tables have no place for is refused: other positions would be computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.core.layout.faults import shown
from shardwright.interop.hugging_face.published import Published
from shardwright.models.parts.rope import Rope

ROPE_KINDS = {"default": "default", "llama3": "llama3", "yarn": "yarn", None: "default"}
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
OF_KIND = {
    "default": ("theta",),
    "llama3": ("theta", "factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("theta", "factor", "original_length", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
"""The numbers that each kind reads."""
ROPE_NEEDS = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
DEFAULT_THETA = {"mixtral": 1_000_000.0}
"""Of each class; 10,000 of any other."""
NEAR = 1e-6
"""Of a factor that is written in decimals and also follows from others."""


def rope_key(published: Published) -> str:
    """The key whose object is the rope: the former name has precedence, as in transformers."""
    return "rope_scaling" if published.values.get("rope_scaling") else "rope_parameters"


def unread_of_rope(published: Published) -> tuple[str, ...]:
    """The keys of the rope's object that its kind does not read."""
    stated = published.values.get(rope_key(published)) or {}
    kind = ROPE_KINDS[stated.get("rope_type", stated.get("type"))]
    read = {ROPE_NAMES[name] for name in OF_KIND[kind]} | {"type", "rope_type", "partial_rotary_factor"}
    read |= {"truncate", "attention_factor"} if kind == "yarn" else set()
    return tuple(name for name, value in stated.items() if name not in read and value is not None)


def rope_of(published: Published, *, latent: bool = False, interleaved: bool = False) -> Rope:
    """``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` in earlier configs. What is not there is as in transformers.

    ``latent``: of latent attention, whose scores have a factor of the rope too.
    """
    key = rope_key(published)
    stated = published.values.get(key) or {}
    if not isinstance(stated, dict):
        published.refuse(key, f"'{key}' is an object; found {shown(stated)}.")
    if nested := next((name for name, value in stated.items() if isinstance(value, dict)), None):
        published.refuse(key, f"'{key}' has an entry for '{nested}', and a table of ours has one rope for all layers.")
    kind = stated.get("rope_type", stated.get("type"))
    if not isinstance(kind, str | None) or kind not in ROPE_KINDS:
        known = [name for name in ROPE_KINDS if name]
        published.refuse(key, f"no table of ours has rope_type {shown(kind)}. Known: {', '.join(known)}.")
    kind = ROPE_KINDS[kind]
    numbers = dict(stated)
    if kind != "default":
        length = published.values.get(ORIGINAL_LENGTH) or stated.get(ORIGINAL_LENGTH)
        numbers[ORIGINAL_LENGTH] = length or published.integer("max_position_embeddings")
    values: dict[str, float] = {}
    for ours in OF_KIND[kind]:
        theirs = ROPE_NAMES[ours]
        if numbers.get(theirs) is not None:
            values[ours] = published.number(key, f"'{theirs}' of '{key}'", numbers[theirs])
        elif theirs in ROPE_NEEDS.get(kind, ()):
            published.refuse(key, f"'{key}' of type {kind} has no '{theirs}', which it needs.")
    if "theta" not in values:
        stated_theta = published.values.get("rope_theta") is not None
        default = DEFAULT_THETA.get(published.values["model_type"], 10_000.0)
        values["theta"] = published.number("rope_theta") if stated_theta else default
    length = {"original_length": int(values.pop("original_length"))} if "original_length" in values else {}
    rope = Rope(kind=kind, interleaved=interleaved, **length, **values)  # pyright: ignore[reportArgumentType]
    for name, needed in _fixed(stated, rope, latent=latent).items():
        if (value := stated.get(name, published.values.get(name))) is not None and value != needed:
            published.refuse(
                name,
                f"'{name}' is {shown(value)}, and a rope of type {kind} has {shown(needed)} in our tables.",
            )
    return rope


def _fixed(stated: Mapping[str, Any], rope: Rope, *, latent: bool) -> Mapping[str, object]:
    """Values of a rope that our tables do not have, each with the value that they take it to have."""
    taken: dict[str, object] = {"partial_rotary_factor": 1.0}
    if rope.kind == "yarn":
        factor = stated.get("attention_factor")
        near = isinstance(factor, int | float) and abs(factor - rope.amplitude) < NEAR
        taken |= {"truncate": True, "attention_factor": factor if near else rope.amplitude}
    elif rope.kind != "default" and latent:
        taken["mscale_all_dim"] = 0
    return taken
