"""The cases of findings about compiled programs: at least one for each code, and one for each kind of finding it has."""

from __future__ import annotations

from tests.golden import compiled_programs as programs
from tests.golden.compiled_case import CompiledCase
from tests.golden.compiled_programs import V5P, planned
from tests.golden.findings_case import EP, mine

EIGHT_EXPERTS = mine(EP, "{data: 1, fsdp: 1, expert: 8}", "move: {moe: all-to-all}\n")
WEIGHTS_TRAVEL = mine(EP, "{data: 1, fsdp: 1, expert: 8}", "move: {moe: weights}\n")
FSDP = mine("fsdp: fsdp", "{fsdp: auto}")
HSDP = mine("data: data\nfsdp: fsdp", "{data: 2, fsdp: auto}")
EP_AS_CP = mine("fsdp: fsdp\nexpert: {elsewhere: context, moe: expert}", "{fsdp: 1, expert: 8}")
MIXTRAL = {"batch": 8, "length": 2048, "weights_dtype": "bfloat16", "moments_dtype": "bfloat16"}
LLAMA = {"batch": 16, "length": 4096}

COMPILED_CASES: tuple[CompiledCase, ...] = (
    CompiledCase(
        name="SW301-weights-gathered",
        model="mixtral-8x7b",
        layout=EIGHT_EXPERTS,
        options=MIXTRAL,
        chips=V5P,
        program=programs.weights_gathered,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW301-tokens-gathered",
        model="mixtral-8x7b",
        layout=EIGHT_EXPERTS,
        options=MIXTRAL,
        chips=V5P,
        program=programs.tokens_gathered,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW301-tokens-exchanged",
        model="mixtral-8x7b",
        layout=WEIGHTS_TRAVEL,
        options=MIXTRAL,
        chips=V5P,
        program=programs.tokens_exchanged,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW302-gathered-again",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.gathered_again,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW302-missing-sum",
        model="llama3-8b",
        layout=HSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.without_replica_sums,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW303-replicas",
        model="llama3-8b",
        layout=HSDP,
        options={**LLAMA, "batch": 32, "microbatches": 4},
        chips=V5P,
        program=programs.replicas_in_the_loop,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW303-same-in-each-turn",
        model="llama3-8b",
        layout=FSDP,
        options={**LLAMA, "microbatches": 2},
        chips=V5P,
        program=programs.same_in_each_iteration,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW304-gathered-and-sliced",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.gathered_and_sliced,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW304-as-the-compiler-says",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.reported_as_replicated,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW305-keys",
        model="deepseek3-16b",
        layout=EP_AS_CP,
        options={"batch": 8, "length": 4096},
        chips=V5P,
        program=programs.keys_gathered,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW305-beyond-the-plan",
        model="deepseek3-16b",
        layout=EP_AS_CP,
        options={"batch": 8, "length": 4096},
        chips=V5P,
        program=programs.keys_gathered_unnamed,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW306-gradients",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.all_reduced,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW307-attention",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.repeated_products,
        neighbour=programs.as_many_products,
    ),
    CompiledCase(
        name="SW308-weights",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.wider,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW309-feed-forward",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.waited_for,
        neighbour=programs.hidden,
    ),
    CompiledCase(
        name="SW310-not-donated",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.not_donated,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW311-scores",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.with_scores,
        neighbour=programs.with_a_layer,
    ),
    CompiledCase(
        name="SW312-peak",
        model="llama3-8b",
        layout=FSDP,
        options={**LLAMA, "batch": 32},
        chips=V5P,
        program=programs.too_large,
        neighbour=planned,
    ),
    CompiledCase(
        name="SW314-dequantized",
        model="llama3-8b",
        layout=FSDP,
        options={**LLAMA, "precision": "fp8-current"},
        chips="h100:1x8",
        program=programs.dequantized,
        neighbour=programs.of_codes,
    ),
    CompiledCase(
        name="SW313-newer",
        model="llama3-8b",
        layout=FSDP,
        options=LLAMA,
        chips=V5P,
        program=programs.newer_tool,
        neighbour=programs.wanted_tool,
    ),
)

ON_PAGES = {case.code: case for case in reversed(COMPILED_CASES) if case.code != "SW312"}
"""The case that each page shows: the first of its code. The page of SW312 shows a plan."""
