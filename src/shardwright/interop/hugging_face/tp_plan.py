"""A tensor-parallel plan of transformers (``base_model_tp_plan``) as a layout: role ``tensor`` where it shards weights.

A style gives the sharded dim of a module's weight. Role ``tensor`` shards the heads, hidden units and vocabulary of all weights of
a component. So roles cannot express a plan that shards one weight of a component and not the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import nearest
from shardwright.core.findings.position import Position
from shardwright.core.layout.faults import shown
from shardwright.core.layout.layout import Layout, MeshEntry
from shardwright.core.layout.roles import COMPONENTS, ROLES
from shardwright.core.layout.wording import every
from shardwright.core.model.table import ModelTable, Weight
from shardwright.interop.hugging_face.published import Published
from shardwright.interop.layout_text import entry_of

PLAN_KEYS = ("tp_plan", "base_model_tp_plan", "_tp_plan")
EP_KEYS = ("base_model_ep_plan", "ep_plan")

OUTPUTS, INPUTS, EXPERTS, NOTHING = "outputs", "inputs", "experts", "nothing"
STYLES: Mapping[str, str] = {
    "colwise": OUTPUTS,
    "colwise_rep": OUTPUTS,
    "colwise_gather_output": OUTPUTS,
    "packed_colwise": OUTPUTS,
    "rowwise": INPUTS,
    "rowwise_rep": INPUTS,
    "rowwise_split_input": INPUTS,
    "packed_rowwise": INPUTS,
    "embedding_rowwise": INPUTS,
    "embedding_colwise": OUTPUTS,
    "grouped_gemm": EXPERTS,
    "replicate": NOTHING,
    "sequence_parallel": NOTHING,
    "replicated_with_grad_allreduce": NOTHING,
    "mla_kv_a_proj": NOTHING,
    "all_reduce": NOTHING,
    "moe_tp_experts": NOTHING,
    "moe_identity_expert": NOTHING,
    "ep_dispatch_experts": NOTHING,
    "ep_router": NOTHING,
    "local_params": NOTHING,
}
"""The styles of transformers 5, and the dim of a weight that each shards over the axis."""

MODULES: Mapping[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("attention.q",),
    "self_attn.k_proj": ("attention.k",),
    "self_attn.v_proj": ("attention.v",),
    "self_attn.o_proj": ("attention.o",),
    "self_attn.q_a_proj": ("attention.q_down",),
    "self_attn.q_b_proj": ("attention.q_up",),
    "self_attn.kv_a_proj_with_mqa": ("attention.kv_down",),
    "self_attn.kv_b_proj": ("attention.kv_up",),
    "mlp.gate_proj": ("mlp.gate",),
    "mlp.up_proj": ("mlp.up",),
    "mlp.down_proj": ("mlp.down",),
    "mlp.shared_experts.gate_proj": ("shared.gate",),
    "mlp.shared_experts.up_proj": ("shared.up",),
    "mlp.shared_experts.down_proj": ("shared.down",),
    "mlp.experts.gate_up_proj": ("moe.gate", "moe.up"),
    "mlp.experts.gate_proj": ("moe.gate",),
    "mlp.experts.up_proj": ("moe.up",),
    "mlp.experts.down_proj": ("moe.down",),
    "mlp.experts.*.gate_proj": ("moe.gate",),
    "mlp.experts.*.up_proj": ("moe.up",),
    "mlp.experts.*.down_proj": ("moe.down",),
    "block_sparse_moe.experts.*.w1": ("moe.gate",),
    "block_sparse_moe.experts.*.w2": ("moe.down",),
    "block_sparse_moe.experts.*.w3": ("moe.up",),
    "mlp.gate": ("router.kernel",),
    "block_sparse_moe.gate": ("router.kernel",),
    "mlp.experts": (),
    "self_attn": (),
    "mlp": (),
    "input_layernorm": (),
    "post_attention_layernorm": (),
    "norm": (),
    "embed_tokens": ("embedding.tokens",),
    "lm_head": ("logits.kernel",),
}
"""The module at the end of a pattern, inside a layer or outside, and our weights. Empty: it has no weight that can be sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSharding:
    """The sharded dim of each weight, by our name without the stack; ``experts``: complete experts are distributed."""

    sharded_dims: Mapping[str, str]
    patterns: Mapping[str, str]
    """The pattern that shards each weight."""
    findings: tuple[Finding, ...]


def plan_in(published: Published) -> Mapping[str, Any] | None:
    """The plan in a file: under its own key, or the entire file where it is no configuration."""
    merged: dict[str, Any] = {}
    for key in (*PLAN_KEYS, *EP_KEYS):
        value = published.values.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            published.refuse(key, f"'{key}' is an object of module patterns and styles; found {shown(value)}.")
        merged.update(value)
    if merged or "model_type" in published.values:
        return merged or None
    return published.values


def plan_place(published: Published) -> Position | None:
    """The position of the plan; None where the entire file is one."""
    return next((place for key in (*PLAN_KEYS, *EP_KEYS) if (place := published.place(key)) is not None), None)


def read_plan(published: Published, plan: Mapping[str, Any]) -> PlannedSharding:
    """The plan for our weights. Raises InputError for a style that is not a string."""
    sharded_dims: dict[str, str] = {}
    patterns: dict[str, str] = {}
    findings = []
    for pattern, style in plan.items():
        if not isinstance(style, str):
            published.refuse(pattern, f"the style of '{pattern}' is a string, as colwise; found {shown(style)}.")
        module = re.sub(r"^(model\.)?(layers\.(\*|\d+)\.)?", "", pattern)
        if style not in STYLES:
            findings.append(_unknown(published, pattern, f"style '{style}'", style, tuple(STYLES)))
        elif module not in MODULES:
            findings.append(_unknown(published, pattern, f"module '{module}'", module, tuple(MODULES)))
        else:
            for weight in MODULES[module]:
                if STYLES[style] != NOTHING:
                    sharded_dims[weight], patterns[weight] = STYLES[style], pattern
    return PlannedSharding(sharded_dims=sharded_dims, patterns=patterns, findings=tuple(findings))


def _unknown(published: Published, pattern: str, what: str, name: str, known: tuple[str, ...]) -> Finding:
    near = nearest(name, known)
    return Finding(
        code="SW111",
        severity="error",
        where=f"'{pattern}'",
        position=published.place(pattern),
        found=f"{what}, which is not known",
        needed=f"'{near}'" if near else f"one of {', '.join(known)}",
        fix=f"Write '{near}'." if near else "",
    )


def layout_of(published: Published, plan: PlannedSharding, table: ModelTable) -> tuple[Layout, tuple[Finding, ...]]:
    """The layout on one axis, ``tensor``, of size ``auto``, and findings on what roles cannot express."""
    findings: list[Finding] = []
    roles: dict[str, str] = dict.fromkeys(COMPONENTS, "idle")
    for component in ROLES["tensor"].components:
        weights = [w for w in table.weights if w.component == component and _tensor_sharded(w)]
        sharded = [w for w in weights if w.name_in_layer in plan.sharded_dims]
        if not sharded:
            continue
        by_experts = [w for w in sharded if plan.sharded_dims[w.name_in_layer] == EXPERTS]
        wrong = [w for w in sharded if w not in by_experts and not _as_tensor(w, plan.sharded_dims[w.name_in_layer])]
        if len(sharded) < len(weights) or (by_experts and len(by_experts) < len(sharded)) or wrong:
            findings += _partly_sharded(published, plan, component, weights, sharded, wrong)
        else:
            roles[component] = "expert" if by_experts else "tensor"
    layout = Layout(
        name="tp-plan",
        about="A tensor-parallel plan of transformers.",
        mesh={"tensor": MeshEntry(size="auto")},
        entries={"tensor": entry_of(roles)},
    )
    return layout, tuple(findings)


def _tensor_sharded(weight: Weight) -> bool:
    """Whether role ``tensor`` shards the weight."""
    return bool(set(ROLES["tensor"].weights) & set(weight.logical_axes))


def _as_tensor(weight: Weight, sharded: str) -> bool:
    """Whether a style shards the dim that role ``tensor`` shards. PyTorch stores the output dim first."""
    dims = weight.torch_dims or tuple((name,) for name in weight.logical_axes)
    matrix = [dim for dim in dims if dim != ("experts",)]
    outputs = matrix[0] if weight.component != "embedding" else matrix[-1]
    names = outputs if sharded == OUTPUTS else next(dim for dim in matrix if dim != outputs)
    return bool(set(ROLES["tensor"].weights) & set(names))


def _partly_sharded(
    published: Published,
    plan: PlannedSharding,
    component: str,
    weights: list[Weight],
    sharded: list[Weight],
    wrong: list[Weight],
) -> Iterator[Finding]:
    left = [w.name_in_layer for w in weights if w not in sharded]
    named = [w.name_in_layer for w in sharded]
    pattern = plan.patterns[(wrong or sharded)[0].name_in_layer]
    found = (
        f"{every(dict.fromkeys(w.name_in_layer for w in wrong))} sharded on the other dim"
        if wrong
        else f"{every(dict.fromkeys(named))} sharded, and {every(dict.fromkeys(left)) if left else 'not all by experts'}"
        f"{' not' if left else ''}"
    )
    yield Finding(
        code="SW123",
        severity="error",
        where=f"'{pattern}' in '{component}'",
        position=published.place(pattern),
        found=f"{found}: a role shards all weights of a component or none, and none of this one",
        needed=f"a style for each of {every(dict.fromkeys(w.name_in_layer for w in weights))}",
    )
