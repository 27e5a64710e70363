"""The catalogue of findings: every stable code with its severity and its law.

A code never changes its meaning. Each has a page in docs/findings/. SW1xx: the declaration. SW2xx: the topology.
SW3xx: the compiled program and memory. SW4xx: numbers and engines. SW5xx: checkpoints. SW6xx: review.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

NOT_RUN = "SW415"
"""A plan that its engine cannot run; the layout itself is valid."""

TOO_LARGE = "SW312"
"""An estimate until the program is compiled."""

DEQUANTIZED = "SW417"
"""Products of codes that the chip multiplies as values."""

OF_THE_CHIP = frozenset({TOO_LARGE, DEQUANTIZED})
"""Errors of what a chip has or lacks: a program can be compiled for it all the same."""

PAID_IN_MEMORY = frozenset({"SW101", "SW114", "SW124", "SW311", TOO_LARGE})
"""Findings about bytes that a device holds: a fix is smaller, and may be slower."""

NO_NUMBER = "SW207"
"""A step without a time, since a number of the chip is missing."""

NO_ROWS = "SW108"
"""Devices without a row or a token: such a step has no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One kind of finding. ``severity`` is the highest it can have."""

    code: str
    severity: Severity
    title: str
    law: str


CODES: dict[str, Code] = {
    code.code: code
    for code in (
        Code(
            code="SW101",
            severity="error",
            title="bytes that no axis shards",
            law="Every large tensor is sharded by the axes that could shard it.",
        ),
        Code(
            code="SW102",
            severity="error",
            title="one axis wanted by two dims",
            law="An axis shards at most one dim of any tensor.",
        ),
        Code(
            code="SW103",
            severity="error",
            title="an axis that does nothing",
            law="An axis larger than 1 shards something in each component, or is stated to be idle.",
        ),
        Code(
            code="SW104",
            severity="error",
            title="a padded or uneven dim",
            law="A dim that its axes do not divide is padded or sharded unevenly, and that is stated.",
        ),
        Code(
            code="SW105",
            severity="info",
            title="tokens or weights, as `auto` chose",
            law="A choice that is made for the user is printed with the costs of all options.",
        ),
        Code(
            code="SW106",
            severity="error",
            title="mesh sizes",
            law="The sizes of the mesh axes are at least 1 and multiply to the number of devices.",
        ),
        Code(
            code="SW107",
            severity="error",
            title="a split inside a unit",
            law="The axes of a dim divide it, in whole units: heads, KV heads, experts.",
        ),
        Code(
            code="SW108",
            severity="error",
            title="too few rows or tokens",
            law="The axes that shard the batch divide its rows; those that shard the length, its tokens.",
        ),
        Code(
            code="SW109",
            severity="error",
            title="experts and the ranks they borrow",
            law="The ranks that hold experts divide the experts, and the ranks that they are borrowed from.",
        ),
        Code(
            code="SW110",
            severity="error",
            title="layers and stages",
            law="Each stage has units of the model, and the microbatches are as its schedule needs them.",
        ),
        Code(
            code="SW111",
            severity="error",
            title="an unknown name",
            law="Every axis, role, component, logical axis and option is one that exists.",
        ),
        Code(
            code="SW112",
            severity="error",
            title="a result that order or another source decides",
            law="A declaration has the same effect wherever it is written, and nothing replaces it silently.",
        ),
        Code(
            code="SW113",
            severity="error",
            title="rules that two dialects read differently",
            law="A list of rules means the same to every program that reads it.",
        ),
        Code(
            code="SW114",
            severity="error",
            title="a small dim sharded too finely",
            law="A weight is sharded at rest on a dim that is large enough for all its storage axes.",
        ),
        Code(
            code="SW117",
            severity="warning",
            title="a mesh order that makes activations strided",
            law="The persistent axes of a dim come before its gathered axes, in the mesh as on the dim.",
        ),
        Code(
            code="SW118",
            severity="info",
            title="another storage dim than the first",
            law="A weight is sharded at rest on the first dim of its storage list that all its storage axes divide.",
        ),
        Code(
            code="SW119",
            severity="error",
            title="a role where it cannot be",
            law="A role is used only in components where it has something to shard.",
        ),
        Code(
            code="SW120",
            severity="error",
            title="a malformed layout",
            law="A layout is a mapping with name, mesh and roles, and gives each mesh axis one entry.",
        ),
        Code(
            code="SW121",
            severity="info",
            title="what a layout is good for",
            law="A layout states when it pays.",
        ),
        Code(
            code="SW122",
            severity="info",
            title="an option without effect",
            law="A requested option has an effect, or is reported to have none.",
        ),
        Code(
            code="SW123",
            severity="error",
            title="what another language cannot express",
            law="What is translated to another language means the same there, or is reported not to.",
        ),
        Code(
            code="SW124",
            severity="error",
            title="an update that is not sharded",
            law="What a layout shards of updates beside the weights is sharded, and saves memory, or is reported not to.",
        ),
        Code(
            code="SW125",
            severity="error",
            title="chunks of the loss",
            law="The chunks of the loss divide the tokens of a device.",
        ),
        Code(
            code="SW201",
            severity="warning",
            title="a hot axis on a slow link",
            law="An axis that every layer's tokens wait for is within one node or slice.",
        ),
        Code(
            code="SW202",
            severity="warning",
            title="a torus axis without wraparound",
            law="An axis takes entire dims of a torus, long enough for their links to wrap around.",
        ),
        Code(
            code="SW204",
            severity="info",
            title="messages below the latency",
            law="A message is large enough that its transfer takes longer than its latency.",
        ),
        Code(
            code="SW205",
            severity="warning",
            title="activations on the host",
            law="Activations are on the host where their copies take less time than making them again.",
        ),
        Code(
            code="SW206",
            severity="warning",
            title="a step that waits for communication",
            law="A step waits for communication for less than a third of its time.",
        ),
        Code(
            code="SW207",
            severity="warning",
            title="a step without a time",
            law="The chip has every number that the time of a step depends on.",
        ),
        Code(
            code="SW208",
            severity="info",
            title="a faster neighbour",
            law="No single change makes a step faster by more than its estimate is uncertain.",
        ),
        Code(
            code="SW301",
            severity="error",
            title="weights sent in place of tokens",
            law="Tokens are sent to experts, or the experts' weights are gathered, as the layout states.",
        ),
        Code(
            code="SW302",
            severity="error",
            title="an unexpected collective",
            law="A program moves what its plan states, or a known rewrite explains the difference.",
        ),
        Code(
            code="SW303",
            severity="warning",
            title="a collective inside a loop",
            law="A collective that is the same in each iteration is outside the loop, and replicas are summed once per step.",
        ),
        Code(
            code="SW304",
            severity="error",
            title="a tensor gathered in full and sliced",
            law="A shard is sent to where it is used, and no tensor is gathered in full on the way.",
        ),
        Code(
            code="SW305",
            severity="warning",
            title="a tensor sent expanded",
            law="Where a tensor is computed from a smaller one alone, the smaller one is sent.",
        ),
        Code(
            code="SW306",
            severity="warning",
            title="a sum of which each device keeps one shard",
            law="A sum that is then sliced along the same axes is a reduce-scatter.",
        ),
        Code(
            code="SW307",
            severity="warning",
            title="products computed more than once",
            law="A device computes its share of the model's products, and what is recomputed.",
        ),
        Code(
            code="SW308",
            severity="warning",
            title="a collective of a wider dtype",
            law="A collective has the dtype that the plan states.",
        ),
        Code(
            code="SW309",
            severity="info",
            title="exposed communication",
            law="Communication that the step waits for is reported.",
        ),
        Code(
            code="SW310",
            severity="warning",
            title="state that is held twice",
            law="A step writes its weights and moments into the buffers of its inputs.",
        ),
        Code(
            code="SW311",
            severity="info",
            title="logits of tokens by vocabulary",
            law="The largest temporary is not a tensor of tokens by vocabulary.",
        ),
        Code(
            code="SW313",
            severity="error",
            title="a compiler of another version",
            law="A program is compiled by the version that JAX requires.",
        ),
        Code(
            code="SW314",
            severity="warning",
            title="values multiplied in place of codes",
            law="A program multiplies the codes that its plan multiplies, and no values of them.",
        ),
        Code(
            code="SW404",
            severity="warning",
            title="a layout that moves what is quantized",
            law="What a recipe of low precision makes of a tensor is the same under every layout, or is reported not to be.",
        ),
        Code(
            code="SW405",
            severity="warning",
            title="buffer capacity for experts' tokens",
            law="No token is dropped silently, and the capacity of the experts' buffers is reported.",
        ),
        Code(
            code=NOT_RUN,
            severity="error",
            title="what the engine does not run",
            law="A plan is one that its engine can run.",
        ),
        Code(
            code="SW416",
            severity="error",
            title="a shard that ends inside a block",
            law="The elements that share a scale of a recipe are on one device: shards end between two blocks.",
        ),
        Code(
            code=DEQUANTIZED,
            severity="error",
            title="codes that the chip does not multiply",
            law="A chip multiplies the codes that a recipe makes, or the plan reports what it multiplies in their place.",
        ),
        Code(
            code=TOO_LARGE,
            severity="error",
            title="more memory than the chip has",
            law="What a device must hold fits in what the chip lets a program use.",
        ),
        Code(
            code="SW601",
            severity="error",
            title="a locked layout that changed",
            law="A locked layout changes only together with its lock.",
        ),
        Code(
            code="SW603",
            severity="info",
            title="a check that was skipped",
            law="What was not checked is reported, with the reason.",
        ),
    )
}
