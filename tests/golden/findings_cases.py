"""The cases of findings: at least one for each code, and one for each kind of finding that a code has."""

from __future__ import annotations

from tests.golden.compiled_cases import ON_PAGES
from tests.golden.cost_cases import ON_COSTS
from tests.golden.engine_cases import ON_ENGINES
from tests.golden.findings_case import EP, Case, mine
from tests.golden.own_model_cases import OF_OWN_MODELS
from tests.golden.precision_cases import ON_PRECISION
from tests.golden.stage_cases import OF_STAGES
from tests.golden.topology_cases import ON_CHIPS
from tests.golden.update_cases import OF_UPDATES

FSDP = mine("fsdp: fsdp", "{fsdp: auto}")
EIGHT = {"devices": 8}

CASES: tuple[Case, ...] = (
    Case(
        name="SW101-weights-no-axis-shards",
        layout=mine("fsdp: {elsewhere: fsdp, weights: whole}", "{fsdp: auto}"),
        options=EIGHT,
        neighbour={"layout": FSDP},
    ),
    Case(
        name="SW101-weights-left-out-by-a-rule",
        model="mixtral-test",
        layout=mine(EP, rest="rules: {attention: {embed: [fsdp]}}\n"),
        options=EIGHT,
        neighbour={"layout": mine(EP)},
    ),
    Case(
        name="SW101-weights-kept-whole",
        model="mixtral-test",
        layout=mine("data: data\nfsdp: {elsewhere: fsdp, weights: whole}\nexpert: {elsewhere: fsdp, moe: expert}"),
        options=EIGHT,
        neighbour={"layout": mine(EP)},
    ),
    Case(
        name="SW101-tensor-has-no-dim",
        model="deepseek3-test",
        layout="fsdp-tp",
        options=EIGHT,
        neighbour={"options": {"devices": 8, "mesh_sizes": {"tensor": 1}}},
    ),
    Case(
        name="SW101-replicas",
        model="llama3-8b",
        layout="hsdp",
        options={"devices": 16},
        neighbour={"options": {"devices": 16, "mesh_sizes": {"data": 1}}},
    ),
    Case(
        name="SW101-replicas-in-one-component",
        model="mixtral-test",
        layout="ep-as-dp",
        options=EIGHT,
        neighbour={"layout": "ep"},
    ),
    Case(
        name="SW101-activations",
        model="mixtral-test",
        layout=mine("expert: {elsewhere: idle, moe: expert}", "{expert: 4}"),
        neighbour={"layout": mine("expert: {elsewhere: fsdp, moe: expert}", "{expert: 4}")},
    ),
    Case(
        name="SW102-by-a-rule",
        model="mixtral-test",
        layout=mine(EP, rest="rules:\n  moe:\n    embed: [expert]\n"),
        options=EIGHT,
        neighbour={"layout": mine(EP, rest="rules:\n  moe:\n    embed: [fsdp]\n")},
    ),
    Case(
        name="SW102-by-the-role-table",
        layout="tp",
        table="fused",
        options={"devices": 4},
        neighbour={"table": ""},
    ),
    Case(
        name="SW102-twice-in-a-rule",
        layout=mine("fsdp: fsdp", "{fsdp: auto}", "rules: {attention: {embed: [fsdp, fsdp]}}\n"),
        neighbour={"layout": mine("fsdp: fsdp", "{fsdp: auto}", "rules: {attention: {embed: [fsdp]}}\n")},
    ),
    Case(
        name="SW103-shards-nothing",
        layout=mine("data: data\nfsdp: fsdp\nexpert: {elsewhere: idle, moe: expert}"),
        options=EIGHT,
        neighbour={"model": "mixtral-test"},
    ),
    Case(
        name="SW103-nothing-in-one-component",
        layout=FSDP,
        table="bare",
        options=EIGHT,
        neighbour={"table": ""},
    ),
    Case(
        name="SW103-residual-repeated",
        layout=mine("fsdp: fsdp\ntensor: tensor", "{fsdp: auto, tensor: 2}"),
        options=EIGHT,
        neighbour={"layout": FSDP},
    ),
    Case(
        name="SW104-padded",
        layout="fsdp-tp",
        table="odd",
        options={"devices": 8, "mesh_sizes": {"tensor": 4}},
        neighbour={"options": {"devices": 8, "mesh_sizes": {"tensor": 2}}},
    ),
    Case(
        name="SW104-uneven-shards",
        model="deepseek3-671b",
        layout="ep-as-cp",
        options={"devices": 128, "mesh_sizes": {"expert": 8}, "engine": "torch"},
        neighbour={"options": {"devices": 64, "mesh_sizes": {"expert": 8}, "engine": "torch"}},
    ),
    Case(
        name="SW104-padded-vocabulary",
        model="llama3-test vocab=2049",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensor": 4}},
        neighbour={"model": "llama3-test"},
    ),
    Case(
        name="SW104-unequal-not-saved",
        model="llama3-test mlp=25",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensor": 2}, "engine": "torch"},
        neighbour={"model": "llama3-test"},
    ),
    Case(
        name="SW104-unequal-old-rows",
        model="llama3-test mlp=9",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensor": 2}, "engine": "torch"},
        neighbour={"model": "llama3-test"},
    ),
    Case(
        name="SW104-unequal",
        model="llama3-test mlp=770",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensor": 4}, "engine": "torch"},
        neighbour={"model": "llama3-test"},
    ),
    Case(
        name="SW105-auto",
        model="mixtral-8x7b",
        layout=mine(EP, rest="move: {moe: auto}\n"),
        options=EIGHT,
        neighbour={"layout": mine(EP, rest="move: {moe: ring}\n")},
    ),
    Case(
        name="SW123-training",
        model="deepseek3-test",
        layout="ep",
        options=EIGHT,
        neighbour={"model": "llama3-test", "layout": "fsdp"},
    ),
    Case(
        name="SW405-dropless",
        model="mixtral-8x7b",
        layout="ep",
        options=EIGHT,
        # One device has all the experts: its buffer has capacity for every assignment, and there cannot be more.
        neighbour={"layout": "fsdp"},
    ),
    Case(
        name="SW405-capacity",
        model="mixtral-8x7b capacity_factor=1.25",
        layout="fsdp",
        options=EIGHT,
        neighbour={"model": "mixtral-8x7b"},
    ),
    Case(
        name="SW405-buffer",
        model="mixtral-8x7b",
        layout="ep",
        options={**EIGHT, "expert_buffer": 1.5},
        neighbour={"layout": "fsdp"},
    ),
    Case(
        name="SW106-product",
        layout="hsdp",
        options={"devices": 12, "mesh_sizes": {"data": 2, "fsdp": 4}},
        neighbour={"options": {"devices": 8, "mesh_sizes": {"data": 2, "fsdp": 4}}},
    ),
    Case(
        name="SW106-does-not-divide",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensor": 3}},
        neighbour={"options": EIGHT},
    ),
    Case(
        name="SW106-auto-twice",
        layout=mine("data: data\nfsdp: fsdp", "{data: auto, fsdp: auto}"),
        options=EIGHT,
        neighbour={"layout": mine("data: data\nfsdp: fsdp", "{data: 1, fsdp: auto}")},
    ),
    Case(
        name="SW106-below-one",
        layout="hsdp",
        options={"devices": 8, "mesh_sizes": {"data": 0}},
        neighbour={"options": EIGHT},
    ),
    Case(
        name="SW106-size-in-the-file",
        layout=mine("data: data\nfsdp: fsdp", "{data: two, fsdp: auto}"),
        options=EIGHT,
        neighbour={"layout": mine("data: data\nfsdp: fsdp", "{data: 2, fsdp: auto}")},
    ),
    Case(name="SW106-natural-devices", layout="fsdp", neighbour={"options": EIGHT}),
    Case(
        name="SW107-kv-heads",
        model="llama3-8b",
        layout="fsdp-tp",
        options={"devices": 32, "mesh_sizes": {"tensor": 16}},
        neighbour={"options": {"devices": 32, "mesh_sizes": {"tensor": 8}}},
    ),
    Case(
        name="SW107-kv-heads-as-pytorch-stores-them",
        model="llama3-8b",
        layout="fsdp-tp",
        options={"devices": 32, "mesh_sizes": {"tensor": 16}, "engine": "torch"},
        neighbour={"options": {"devices": 32, "mesh_sizes": {"tensor": 8}, "engine": "torch"}},
    ),
    Case(
        name="SW107-experts",
        model="mixtral-8x7b",
        layout="ep",
        options={"devices": 16, "batch": 16, "mesh_sizes": {"expert": 16}},
        neighbour={"options": {"devices": 16, "batch": 16, "mesh_sizes": {"expert": 8}}},
    ),
    Case(
        name="SW107-hidden-units",
        model="llama3-test mlp=770",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensor": 4}},
        neighbour={"model": "llama3-test"},
    ),
    Case(
        name="SW107-heads-for-tokens",
        model="llama3-8b",
        layout=mine("context: context", "{context: 16}", "move: {attention: ulysses}\n"),
        neighbour={"layout": mine("context: context", "{context: 16}", "move: {attention: ring}\n")},
    ),
    Case(
        name="SW108-fewer-rows-than-devices",
        model="mixtral-8x7b",
        layout="ep",
        options={"devices": 16, "batch": 8, "mesh_sizes": {"expert": 8}},
        neighbour={"layout": "ep-as-cp"},
    ),
    Case(
        name="SW108-rows",
        layout="fsdp",
        options={"devices": 8, "batch": 12},
        neighbour={"options": {"devices": 8, "batch": 16}},
    ),
    Case(
        name="SW108-microbatches",
        layout="fsdp",
        options={"devices": 8, "batch": 16, "microbatches": 4},
        neighbour={"options": {"devices": 8, "batch": 16, "microbatches": 2}},
    ),
    Case(
        name="SW108-tokens",
        layout="cp",
        options={"devices": 8, "length": 129},
        neighbour={"options": {"devices": 8, "length": 130}},
    ),
    Case(
        name="SW108-tokens-balanced",
        layout="cp",
        options={"devices": 8, "length": 130, "load_balanced": True},
        neighbour={"options": {"devices": 8, "length": 132, "load_balanced": True}},
    ),
    Case(
        name="SW125-too-many",
        layout=FSDP,
        options={**EIGHT, "microbatches": 2, "batch": 16, "length": 48, "loss_chunks": 32},
        neighbour={"options": {**EIGHT, "microbatches": 2, "batch": 16, "length": 48, "loss_chunks": 24}},
    ),
    Case(
        name="SW125-more-than-tokens",
        layout=FSDP,
        options={**EIGHT, "batch": 8, "length": 64, "loss_chunks": 128},
        neighbour={"options": {**EIGHT, "batch": 8, "length": 64, "loss_chunks": 64}},
    ),
    Case(
        name="SW111-axis",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensorr": 4}},
        neighbour={"options": {"devices": 8, "mesh_sizes": {"tensor": 4}}},
    ),
    Case(
        name="SW111-axis-in-the-file",
        layout=mine("fsdp: fsdp\nfsbp: data", "{fsdp: auto}"),
        neighbour={"layout": FSDP},
    ),
    Case(name="SW111-role", layout=mine("fsdp: fspd", "{fsdp: auto}"), neighbour={"layout": FSDP}),
    Case(
        name="SW111-component",
        layout=mine("fsdp: {elsewhere: fsdp, atention: data}", "{fsdp: auto}"),
        neighbour={"layout": mine("fsdp: {elsewhere: fsdp, attention: data}", "{fsdp: auto}")},
    ),
    Case(
        name="SW111-logical-axis",
        layout=mine("fsdp: {elsewhere: fsdp, weights: [mpl]}", "{fsdp: auto}"),
        neighbour={"layout": mine("fsdp: {elsewhere: fsdp, weights: [mlp]}", "{fsdp: auto}")},
    ),
    Case(
        name="SW111-unused-rule",
        layout=mine("fsdp: fsdp", "{fsdp: auto}", "rules: {attention: {q_lora: [fsdp]}}\n"),
        options=EIGHT,
        neighbour={"model": "deepseek3-test"},
    ),
    Case(
        name="SW111-unused-weights",
        layout="shard-exp-on-fsdp",
        options=EIGHT,
        neighbour={"model": "mixtral-test"},
    ),
    Case(
        name="SW114-q-lora",
        model="deepseek3-671b",
        layout="ep",
        options={"devices": 2048, "batch": 2048, "mesh_sizes": {"expert": 8}},
        neighbour={"layout": "ep-as-dp", "options": {"devices": 1024, "batch": 1024, "mesh_sizes": {"expert": 8}}},
    ),
    Case(
        name="SW114-one-element-left",
        model="deepseek3-671b",
        layout="ep",
        options={"devices": 512, "batch": 512, "mesh_sizes": {"expert": 8}},
        neighbour={"options": {"devices": 128, "batch": 128, "mesh_sizes": {"expert": 8}}},
    ),
    Case(
        name="SW117-mesh-order",
        model="mixtral-test",
        layout=mine("expert: {elsewhere: fsdp, moe: expert}\nfsdp: fsdp", "{expert: 4, fsdp: auto}"),
        options=EIGHT,
        neighbour={"layout": mine("expert: {elsewhere: fsdp, moe: expert}\nfsdp: fsdp", "{fsdp: auto, expert: 4}")},
    ),
    Case(
        name="SW118-another-dim",
        model="llama3-test embed=264",
        layout="fsdp",
        options={"devices": 16, "batch": 16},
        neighbour={"model": "llama3-test"},
    ),
    Case(
        name="SW119-stage-in-logits",
        layout=mine("stage: {elsewhere: stage, logits: stage}", "{stage: 2}"),
        neighbour={"layout": mine("stage: {elsewhere: stage, logits: idle}", "{stage: 2}")},
    ),
    Case(
        name="SW119-expert-outside-moe",
        layout=mine("expert: expert", "{expert: 4}"),
        neighbour={"layout": mine("expert: {elsewhere: fsdp, moe: expert}", "{expert: 4}")},
    ),
    Case(
        name="SW119-option-without-its-role",
        layout=mine("data: {elsewhere: data, sequence_parallel: true, weights: whole}", "{data: auto}"),
        neighbour={"layout": mine("data: data", "{data: auto}")},
    ),
    Case(name="SW120-no-layout", layout="[fsdp]\n", neighbour={"layout": FSDP}),
    Case(name="SW120-nothing-in-it", layout="name: mine\n", neighbour={"layout": FSDP}),
    Case(
        name="SW120-axis-without-roles",
        layout=mine("fsdp: fsdp", "{data: 1, fsdp: auto}"),
        neighbour={"layout": FSDP},
    ),
    Case(
        name="SW120-component-without-role",
        layout=mine("expert: {moe: expert, attention: fsdp}", "{expert: 4}"),
        neighbour={"layout": mine("expert: {elsewhere: idle, moe: expert, attention: fsdp}", "{expert: 4}")},
    ),
    *ON_CHIPS,
    *ON_ENGINES,
    *OF_OWN_MODELS,
    *OF_STAGES,
    *OF_UPDATES,
    *ON_PRECISION,
    *ON_COSTS,
)

ELSEWHERE = {
    "SW109": "tests/interop/test_torchtitan.py",
    "SW112": "tests/golden/imports/SW112-restated.txt",
    "SW113": "tests/golden/imports/SW113-last-line.txt",
    **{code: f"tests/golden/compiled_findings/{case.path.name}" for code, case in ON_PAGES.items()},
    # The case of a program that could be read is a warning.
    "SW313": "tests/compiled/test_tool_chain.py",
    "SW601": "tests/cli/test_check.py",
    "SW603": "tests/cli/test_check.py",
}
"""Codes that no request triggers, and the test file that has their full texts."""
