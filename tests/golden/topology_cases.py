"""The cases of findings that need chips: which links the axes of a mesh use, and how large messages are."""

from __future__ import annotations

from tests.golden.findings_case import Case, mine

EP = "data: data\nfsdp: fsdp\nexpert: {elsewhere: fsdp, moe: expert}"
FSDP = mine("fsdp: fsdp", "{fsdp: auto}")

ON_CHIPS: tuple[Case, ...] = (
    Case(
        name="SW201-over-two-nodes",
        layout=mine("tensor: tensor\nfsdp: fsdp", "{tensor: 8, fsdp: auto}"),
        options={"batch": 16},
        chips="h100:2x8",
        neighbour={"layout": mine("fsdp: fsdp\ntensor: tensor", "{fsdp: auto, tensor: 8}")},
    ),
    Case(
        name="SW201-larger-than-a-node",
        layout=mine("fsdp: fsdp\ntensor: tensor", "{fsdp: auto, tensor: 16}"),
        options={"batch": 16},
        chips="h100:2x8",
        neighbour={"chips": "gb200:1x16"},
    ),
    Case(
        name="SW201-over-two-slices",
        model="mixtral-test",
        layout=mine(EP, "{data: 1, fsdp: 8, expert: {size: 2, link: dcn}}"),
        options={"batch": 16},
        chips="v5p:2x2x2*2",
        neighbour={"layout": mine(EP, "{data: 1, fsdp: 8, expert: 2}")},
    ),
    Case(
        name="SW202-part-of-a-ring",
        layout=mine("fsdp: fsdp\ntensor: tensor", "{fsdp: auto, tensor: 8}"),
        options={"batch": 64},
        chips="v5e:16x16",
        neighbour={"layout": mine("fsdp: fsdp\ntensor: tensor", "{fsdp: auto, tensor: 16}")},
    ),
    Case(
        name="SW202-slice-too-small",
        layout=FSDP,
        options={"batch": 16},
        chips="v5e:4x4",
        neighbour={"chips": "v5p:4x4x4", "options": {"batch": 64}},
    ),
    Case(
        name="SW204-small-model",
        layout=FSDP,
        chips="h100:8",
        neighbour={"model": "llama3-8b", "options": {"batch": 8, "length": 2048}},
    ),
)
