"""The catalogue of findings: every stable code with its severity and the law it speaks for.

A code never changes its meaning. Each has a page in docs/findings/. SW1xx: the declaration. SW2xx: the topology.
SW3xx: the compiled program and memory. SW4xx: numbers and engines. SW5xx: checkpoints. SW6xx: review.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

NOT_RUN = "SW415"
"""An error of the plan and its engine together, and no fault of the layout."""

TOO_LARGE = "SW312"
"""An estimate until the program is compiled."""


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
            title="bytes that no axis cuts",
            law="Every large tensor is cut by the axes that could cut it.",
        ),
        Code(
            code="SW102",
            severity="error",
            title="one axis wanted by two dims",
            law="An axis cuts at most one dim of any tensor.",
        ),
        Code(
            code="SW103",
            severity="error",
            title="an axis that does nothing",
            law="An axis larger than 1 cuts something in each component, or is idle and said so.",
        ),
        Code(
            code="SW104",
            severity="error",
            title="a padded or uneven dim",
            law="A dim that its axes do not divide is padded or cut unevenly, and that is stated.",
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
            law="The axes that cut the batch divide its rows; those that cut the length, its tokens.",
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
            law="The stages divide the layers of every stack, and microbatches fill them.",
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
            law="What a declaration says holds wherever it stands, and nothing replaces it in silence.",
        ),
        Code(
            code="SW113",
            severity="error",
            title="rules that two dialects read differently",
            law="A list of rules means one thing to every program that reads it.",
        ),
        Code(
            code="SW114",
            severity="error",
            title="a small dim cut too finely",
            law="A weight rests cut on a dim that is large enough for all its storing axes.",
        ),
        Code(
            code="SW117",
            severity="warning",
            title="a mesh order that makes activations strided",
            law="Axes that stay on a dim stand before those that leave it, in the mesh as on the dim.",
        ),
        Code(
            code="SW118",
            severity="info",
            title="another storage dim than the first",
            law="A weight rests cut on the first dim of its storage list that all its storage axes divide.",
        ),
        Code(
            code="SW119",
            severity="error",
            title="a role where it cannot be",
            law="A role stands only in components where it has something to cut.",
        ),
        Code(
            code="SW120",
            severity="error",
            title="a layout that is not one",
            law="A layout is a mapping with name, mesh and roles, and gives each mesh axis one entry.",
        ),
        Code(
            code="SW121",
            severity="info",
            title="what a layout is good for",
            law="A layout says when it pays.",
        ),
        Code(
            code="SW122",
            severity="info",
            title="load balancing without a load",
            law="What is asked for has an effect, or is said to have none.",
        ),
        Code(
            code="SW123",
            severity="error",
            title="what another language cannot say",
            law="What is carried over to another language means the same there, or is said not to.",
        ),
        Code(
            code="SW201",
            severity="warning",
            title="a hot axis on a slow link",
            law="An axis that every layer's tokens wait for lies within one node or slice.",
        ),
        Code(
            code="SW202",
            severity="warning",
            title="a torus without its way round",
            law="An axis takes whole dims of a torus, long enough for their links to wrap around.",
        ),
        Code(
            code="SW204",
            severity="info",
            title="messages below the latency",
            law="A message is large enough that sending it takes longer than reaching the others.",
        ),
        Code(
            code="SW301",
            severity="error",
            title="weights that travel in place of tokens",
            law="What travels to meet experts, tokens or weights, is what the layout says.",
        ),
        Code(
            code="SW302",
            severity="error",
            title="a collective that nobody expected",
            law="A program moves what its plan says, or a known rewrite explains the difference.",
        ),
        Code(
            code="SW303",
            severity="warning",
            title="a collective inside a loop",
            law="What a loop does not change is moved outside of it, and replicas are summed once a step.",
        ),
        Code(
            code="SW304",
            severity="error",
            title="a tensor made whole and sliced",
            law="A part goes to where it is used, and no tensor is made whole on the way.",
        ),
        Code(
            code="SW305",
            severity="warning",
            title="a tensor that travels expanded",
            law="Of a small tensor and what is made of it alone, the small one travels.",
        ),
        Code(
            code="SW306",
            severity="warning",
            title="a sum of which each device keeps a part",
            law="What is summed and then sliced along the same axes is reduce-scattered.",
        ),
        Code(
            code="SW307",
            severity="warning",
            title="products made more than once",
            law="A device multiplies its share of the model's products, and what is recomputed.",
        ),
        Code(
            code="SW308",
            severity="warning",
            title="a collective of a wider type",
            law="A collective carries the type that the plan says.",
        ),
        Code(
            code="SW309",
            severity="info",
            title="communication that nothing hides",
            law="What the step waits for is said.",
        ),
        Code(
            code="SW310",
            severity="warning",
            title="state that is held twice",
            law="A step writes its weights and moments over those that it was given.",
        ),
        Code(
            code="SW311",
            severity="info",
            title="scores of tokens by vocabulary",
            law="The largest temporary is not a number for each token and vocabulary entry.",
        ),
        Code(
            code="SW313",
            severity="error",
            title="a compiler of another version",
            law="A program is compiled by the version that JAX asks for.",
        ),
        Code(
            code="SW405",
            severity="warning",
            title="room for experts' tokens",
            law="No token is dropped in silence, and no room is kept for one without saying so.",
        ),
        Code(
            code=NOT_RUN,
            severity="error",
            title="what the engine does not run",
            law="A plan is one that its engine runs.",
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
            title="a locked layout that moved",
            law="What is locked moves only together with its lock.",
        ),
        Code(
            code="SW603",
            severity="info",
            title="a check that was skipped",
            law="What was not checked is said, with the reason.",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A number that decides a severity, and why it is that number."""

    value: float
    why: str


REPLICATED_ERROR_SHARE = Threshold(
    value=0.05, why="half of a model's optimizer state at 5% of its weights is a chip's worth of memory at 405 B"
)
REPLICATED_WARNING_SHARE = Threshold(value=0.01, why="below 1% a gather costs more latency than the bytes are worth")
OVERCUT_ELEMENTS = Threshold(
    value=2, why="with one element left on a device, the next doubling of the mesh has no legal cut"
)
PADDING_WARNING_SHARE = Threshold(value=0.1, why="a tenth more bytes in a gather is more than its latency hides")
MEMORY_WARNING_SHARE = Threshold(
    value=0.9, why="activations are an estimate, and the compiler's own buffers take some of the rest"
)
LATENCY_INFO_SHARE = Threshold(value=0.05, why="below 5% of the communication, larger messages would not be seen")
UNMATCHED_ERROR_SHARE = Threshold(
    value=0.01, why="the bytes of a collective that agrees are predicted to within 1%; more is another program"
)
EXPANDED_WARNING_RATIO = Threshold(
    value=4, why="queries, keys and values that share an input are three times what they are made of"
)
FLOPS_WARNING_SHARE = Threshold(
    value=0.1, why="padding to whole tiles stays below a tenth at the sizes that are trained"
)
DONATED_SHARE = Threshold(
    value=0.5,
    why="a donated state shares all but a few numbers with the output; below half, a large part is held twice",
)
THRESHOLDS: dict[str, Threshold] = {
    "weights or activations that no axis cuts: error from": REPLICATED_ERROR_SHARE,
    "weights or activations that no axis cuts: warning from": REPLICATED_WARNING_SHARE,
    "elements left of a storage dim: warning below": OVERCUT_ELEMENTS,
    "uneven parts, bytes more in a gather: warning from": PADDING_WARNING_SHARE,
    "memory of the chip: warning from": MEMORY_WARNING_SHARE,
    "communication that waits for the links: information from": LATENCY_INFO_SHARE,
    "compiled bytes that no rewrite explains: error from": UNMATCHED_ERROR_SHARE,
    "bytes that travel, for each byte that they were made of: warning above": EXPANDED_WARNING_RATIO,
    "compiled flops beyond the planned: warning above": FLOPS_WARNING_SHARE,
    "state in the place of what was given: warning below": DONATED_SHARE,
}
"""Every number that decides a severity, under what it is compared with."""
