"""The numbers that decide the severity of a finding, each with the reason why it is that number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A number that decides a severity, and why it is that number."""

    value: float
    why: str


REPLICATED_ERROR_SHARE = Threshold(
    value=0.05, why="half of the optimizer state of 5% of the weights fills a chip's memory at 405 B parameters"
)
REPLICATED_WARNING_SHARE = Threshold(
    value=0.01, why="below 1% the latency of a gather costs more than the memory that it saves"
)
OVERSHARDED_ELEMENTS = Threshold(
    value=2, why="with one element left on a device, the dim cannot be sharded after the mesh is doubled again"
)
PADDING_WARNING_SHARE = Threshold(value=0.1, why="a tenth more bytes in a gather is more than its latency hides")
MEMORY_WARNING_SHARE = Threshold(
    value=0.9, why="activations are an estimate, and the compiler's own buffers take some of the rest"
)
LATENCY_INFO_SHARE = Threshold(
    value=0.05, why="below 5% of the communication, larger messages would make no visible difference"
)
EXPOSED_WARNING_SHARE = Threshold(
    value=1 / 3,
    why="half as long again as its products: another layout, more rows or longer products would be seen at once",
)
GATHERED_ERROR_SHARE = Threshold(
    value=0.01, why="below a hundredth of the step, no measured step is longer by more than it varies"
)
UNMATCHED_ERROR_SHARE = Threshold(
    value=0.01,
    why="the bytes of a collective that agrees are predicted to within 1%; a larger difference is another program",
)
EXPANDED_WARNING_RATIO = Threshold(
    value=4, why="queries, keys and values that share an input are three times as large as it"
)
FLOPS_WARNING_SHARE = Threshold(
    value=0.1, why="padding to full tiles stays below a tenth at the sizes that are trained"
)
DONATED_SHARE = Threshold(
    value=0.5,
    why="a donated state shares all but a few numbers with the output; below half, a large part is held twice",
)
THRESHOLDS: dict[str, Threshold] = {
    "weights or activations that no axis shards: error from": REPLICATED_ERROR_SHARE,
    "weights or activations that no axis shards: warning from": REPLICATED_WARNING_SHARE,
    "elements left of a storage dim: warning below": OVERSHARDED_ELEMENTS,
    "uneven shards, additional bytes in a gather: warning from": PADDING_WARNING_SHARE,
    "memory of the chip: warning from": MEMORY_WARNING_SHARE,
    "communication that is latency: information from": LATENCY_INFO_SHARE,
    "communication that a step waits for: warning from": EXPOSED_WARNING_SHARE,
    "a tensor gathered in full, of the step's time: error from": GATHERED_ERROR_SHARE,
    "compiled bytes that no rewrite explains: error from": UNMATCHED_ERROR_SHARE,
    "bytes sent, for each byte that they were computed from: warning above": EXPANDED_WARNING_RATIO,
    "compiled flops beyond the planned: warning above": FLOPS_WARNING_SHARE,
    "state in the buffers of the inputs: warning below": DONATED_SHARE,
}
"""Every number that decides a severity, by the quantity that it is compared with."""
