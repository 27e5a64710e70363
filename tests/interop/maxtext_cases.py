"""MaxText files with one fault each, and a neighbour without it; the full text of the finding is a golden file.

To write new or changed texts: ``python -m tests.interop.regenerate``. Read the diff before you commit it.
"""

from __future__ import annotations

from tests.interop.maxtext_case import CLEAN_FILE, Case, mine
from tests.interop.maxtext_key_cases import KEY_CASES
from tests.interop.rule_files import CLEAN, PRESET, edited, line, without

ROWS = line("activation_batch_moe", "data", "fsdp", "expert")
FALLBACK = line("activation_batch_moe", "data", "fsdp")
EXP = line("activation_exp", "expert")

CASES: tuple[Case, ...] = (
    Case(
        name="SW101-masks-replicated-without-a-length-rule",
        files={"preset.yml": without(PRESET, "activation_norm_length_moe")},
        options={"mesh_sizes": {"fsdp": 2, "expert": 4}},
        neighbour_files={"preset.yml": PRESET},
        where="moe.masks",
    ),
    Case(
        name="SW101-masks-replicated-without-an-axis",
        files={"rules.yml": edited(CLEAN, (ROWS, ""))},
        options={"mesh_sizes": {"fsdp": 1, "expert": 8}},
        neighbour_files=CLEAN_FILE,
        where="moe.masks",
    ),
    Case(
        name="SW101-logits-tiled",
        files=mine(("sequence, [data, fsdp, context, expert]", "sequence, [data, fsdp, expert]")),
        options={"mesh_sizes": {"fsdp": 2, "context": 2}, "model": "llama3-test"},
        neighbour_files=CLEAN_FILE,
        where="logits.tiled",
    ),
    Case(
        name="SW101-weights-no-rule-shards",
        files=mine((line("embed", "fsdp", "context", "expert"), line("embed"))),
        options={"model": "llama3-test"},
        neighbour_files=CLEAN_FILE,
        where="weights over",
    ),
    Case(
        name="SW101-weights-some-axes-shard",
        files=mine((line("embed", "fsdp", "context", "expert"), line("embed", "fsdp"))),
        options={"model": "llama3-test"},
        neighbour_files=CLEAN_FILE,
        where="weights over",
    ),
    Case(
        name="SW101-past-the-guard",
        files=mine((line("embed_vocab", "fsdp", "context", "expert"), line("embed_vocab", "fsdp", "context"))),
        options={"mesh_sizes": {"fsdp": 2, "expert": 4}, "settings": {"vocab": "512"}},
        neighbour_files=CLEAN_FILE,
        where="guard",
    ),
    Case(
        name="SW102-dispatched-by-rows",
        files={"rules.yml": edited(CLEAN, (EXP, ""), (FALLBACK, EXP))},
        neighbour_files=CLEAN_FILE,
        where="dispatched to experts",
    ),
    Case(
        name="SW102-axis-lost",
        files=mine((line("kv"), line("kv", "tensor"))),
        options={"mesh_sizes": {"fsdp": 2, "tensor": 2, "expert": 2}},
        neighbour_files=CLEAN_FILE,
        where="'kv'",
    ),
    Case(
        name="SW102-falls-back",
        files=CLEAN_FILE,
        options={},
        neighbour_files={"rules.yml": edited(CLEAN, (ROWS, ""))},
    ),
    Case(
        name="SW102-twice-in-a-rule",
        files=mine((line("q_heads", "tensor"), line("q_heads", "tensor", "tensor"))),
        neighbour_files=CLEAN_FILE,
    ),
    Case(
        name="SW103-idle-in-the-experts",
        files=CLEAN_FILE,
        options={"mesh_sizes": {"fsdp": 2, "context": 2, "expert": 2}},
        neighbour_options={"mesh_sizes": {"fsdp": 4, "context": 1, "expert": 2}},
    ),
    Case(
        name="SW106-size-for-a-missing-axis",
        files=mine(("ici_fsdp_parallelism: 2", "ici_fsdp_parallelism: -1\nici_sequence_parallelism: 4")),
        options={"devices": 8},
        neighbour_files=mine(("ici_fsdp_parallelism: 2", "ici_fsdp_parallelism: -1")),
    ),
    Case(
        name="SW106-product",
        files=CLEAN_FILE,
        options={"devices": 16},
        neighbour_options={"devices": 8},
    ),
    Case(
        name="SW106-two-open",
        files=mine(("ici_expert_parallelism: 4", "ici_expert_parallelism: -1\nici_data_parallelism: -1")),
        options={"devices": 8},
        neighbour_files=mine(("ici_expert_parallelism: 4", "ici_expert_parallelism: -1")),
    ),
    Case(
        name="SW106-slices",
        files=mine(("ici_expert_parallelism: 4", "ici_expert_parallelism: 4\ndcn_data_parallelism: 3")),
        options={"devices": 16, "slices": 2},
        neighbour_files=mine(("ici_expert_parallelism: 4", "ici_expert_parallelism: 4\ndcn_data_parallelism: 2")),
    ),
    Case(
        name="SW107-heads",
        files=CLEAN_FILE,
        options={"mesh_sizes": {"fsdp": 1, "tensor": 8, "expert": 1}},
        neighbour_options={"mesh_sizes": {"fsdp": 1, "tensor": 4, "expert": 1}},
    ),
    Case(
        name="SW107-some-axes-kept",
        files=mine(
            (line("vocab", "tensor"), line("vocab", "tensor", "context")),
            (line("embed_vocab", "fsdp", "context", "expert"), line("embed_vocab", "fsdp", "expert")),
        ),
        options={
            "mesh_sizes": {"fsdp": 2, "tensor": 2, "context": 2, "expert": 1},
            "model": "llama3-test",
            "settings": {"vocab": "6"},
        },
        neighbour_files=CLEAN_FILE,
    ),
    Case(
        name="SW108-rows",
        files=CLEAN_FILE,
        options={"batch": 6, "model": "llama3-test"},
        neighbour_options={"batch": 16},
    ),
    Case(
        name="SW108-rows-replicated-in-the-experts",
        files=CLEAN_FILE,
        options={"batch": 6, "mesh_sizes": {"fsdp": 8, "expert": 1}},
        neighbour_options={"batch": 16},
    ),
    Case(
        name="SW111-name",
        files=mine(
            (line("activation_batch", "data", "fsdp", "expert"), line("activation_btach", "data", "fsdp", "expert"))
        ),
        neighbour_files=CLEAN_FILE,
        where="activation_btach",
    ),
    Case(
        name="SW111-name-like-no-other",
        files=mine((line("norm"), line("norm") + line("zebra", "fsdp"))),
        neighbour_files=CLEAN_FILE,
        where="zebra",
    ),
    Case(
        name="SW111-axis",
        files=mine((line("heads", "tensor"), line("heads", "tensorr"))),
        neighbour_files=CLEAN_FILE,
        where="tensorr",
    ),
    Case(
        name="SW111-axis-of-another-mesh",
        files=mine(("mesh_axes: [data, fsdp, context, tensor, expert]", "mesh_axes: [data, fsdp, tensor, expert]")),
        neighbour_files=CLEAN_FILE,
        where="axis 'context'",
    ),
    Case(
        name="SW111-mesh-axis",
        files=mine(("mesh_axes: [data,", "mesh_axes: [datta,")),
        neighbour_files=CLEAN_FILE,
        where="datta",
    ),
    Case(
        name="SW111-size",
        files=mine(("ici_expert_parallelism: 4", "ici_exprt_parallelism: 4")),
        neighbour_files=CLEAN_FILE,
        where="exprt",
    ),
    Case(
        name="SW111-key-of-the-command-line",
        files=CLEAN_FILE,
        options={"given": ("steps=3", "capacity_facto=1.25")},
        neighbour_options={"given": ("steps=3", "capacity_factor=1.25")},
        where="capacity_facto",
    ),
    Case(
        name="SW111-never-applies",
        files=mine((line("kv_head_dim"), line("kv_head_dim", "tensor"))),
        options={"mesh_sizes": {"fsdp": 2, "tensor": 2, "expert": 2}},
        neighbour_files=CLEAN_FILE,
        where="kv_head_dim",
    ),
    Case(
        name="SW111-names-without-a-rule",
        files={"rules.yml": without(CLEAN, "mlp_moe", "norm")},
        neighbour_files=CLEAN_FILE,
        where="names of mixtral-test",
    ),
    Case(
        name="SW111-evaluation",
        files={**CLEAN_FILE, "eval.yml": PRESET.replace("expert]", "stage]")},
        options={"eval_preset": "eval.yml"},
        neighbour_files={"eval.yml": PRESET},
        where="evaluation",
    ),
    Case(
        name="SW112-restated",
        files={"model.yml": f"logical_axis_rules:\n{ROWS}", "base.yml": edited(CLEAN, (EXP, ""), (FALLBACK, EXP))},
        options={"base": "base.yml"},
        neighbour_files={"model.yml": f"logical_axis_rules:\n{line('norm')}"},
        where="stated again",
    ),
    Case(
        name="SW112-axis-of-size-1",
        files=mine((line("kv_head_dim"), line("kv_head_dim", "context", "tensor"))),
        options={"mesh_sizes": {"fsdp": 2, "tensor": 2}, "given": ("logical_axis_rules=[[kv_heads, [context]]]",)},
        neighbour_options={"given": ()},
        where="'kv_head_dim'",
    ),
    Case(
        name="SW112-free-axes",
        files={"rules.yml": edited(CLEAN, (FALLBACK, ""))},
        neighbour_files=CLEAN_FILE,
        where="'activation_batch_moe'",
    ),
    Case(
        name="SW112-order",
        files={"rules.yml": edited(CLEAN, (EXP, ""), (FALLBACK, EXP))},
        neighbour_files={"rules.yml": edited(CLEAN, (ROWS, ""))},
        where="the order of names",
    ),
    Case(
        name="SW112-unreachable",
        files=mine((line("vocab", "tensor"), line("vocab", "tensor") + line("vocab", "tensor", "fsdp"))),
        neighbour_files=CLEAN_FILE,
        where="another rule",
    ),
    Case(
        name="SW112-preset-and-rules",
        files={
            "model.yml": f"custom_mesh_and_rule: mine\nlogical_axis_rules:\n{line('norm', 'fsdp')}",
            "base.yml": CLEAN,
            "custom_mesh_and_rule/mine.yml": PRESET,
        },
        options={"base": "base.yml"},
        neighbour_files={"model.yml": "custom_mesh_and_rule: mine\n"},
        where="given together",
    ),
    Case(
        name="SW112-overridden-by-nothing",
        files={"model.yml": "override_logical_axis_rules: true\ncontext_sharding: context\n", "base.yml": CLEAN},
        options={"base": "base.yml"},
        neighbour_files={"model.yml": "override_logical_axis_rules: false\n"},
        where="override_logical_axis_rules",
    ),
    Case(
        name="SW113-no-rule",
        files={"rules.yml": without(CLEAN, "kv")},
        options={"dialect": "flax-nnx"},
        neighbour_files=CLEAN_FILE,
    ),
    Case(
        name="SW113-axis-twice",
        files=mine((line("kv"), line("kv", "tensor"))),
        options={"mesh_sizes": {"fsdp": 2, "tensor": 2, "expert": 2}, "dialect": "flax-nnx"},
        neighbour_files=CLEAN_FILE,
    ),
    Case(
        name="SW113-last-line",
        files=mine((line("vocab", "tensor"), line("vocab", "tensor") + line("vocab", "data"))),
        options={"mesh_sizes": {"fsdp": 2, "tensor": 2, "data": 2}, "model": "llama3-test", "dialect": "flax-nnx"},
        neighbour_options={"dialect": "nnx"},
    ),
    Case(
        name="SW123-multi-token-prediction",
        files=mine(("ici_expert_parallelism: 4", "ici_expert_parallelism: 4\nmtp_num_layers: 1")),
        neighbour_files=CLEAN_FILE,
        where="mtp_num_layers",
    ),
    Case(
        name="SW123-stream-sharded-on-embed",
        files=mine((line("activation_embed"), line("activation_embed", "tensor"))),
        options={"mesh_sizes": {"fsdp": 2, "tensor": 2}, "model": "llama3-test"},
        neighbour_files=CLEAN_FILE,
    ),
    *KEY_CASES,
)
