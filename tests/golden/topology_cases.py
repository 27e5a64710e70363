"""The cases of findings that need chips: which links the axes of a mesh use, and how large messages are."""

from __future__ import annotations

from tests.golden.findings_case import EP, IN_NODES, Case, mine

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
        name="SW201-experts-over-nodes",
        model="deepseek3-671b",
        layout=mine(EP, "{data: 1, fsdp: auto, expert: 64}"),
        options={"batch": 256, "length": 4096},
        chips="h100:32x8",
        neighbour={
            "layout": mine(IN_NODES, "{data: 1, fsdp: auto, node: 8, expert: 8}", "move: {moe: two-hops}\n"),
        },
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
        name="SW122-hops-of-nothing",
        layout=FSDP,
        options={"batch": 16, "hops": "one"},
        chips="h100:2x8",
        neighbour={"options": {"batch": 16, "hops": "auto"}},
    ),
    Case(
        name="SW122-hops-over-a-part",
        layout=mine("data: data\nfsdp: fsdp", "{data: 16, fsdp: 16}"),
        options={"batch": 256, "hops": "two"},
        chips="v6e:16x16",
        neighbour={"layout": FSDP},
    ),
    Case(
        name="SW122-hops-of-one-dim",
        layout=FSDP,
        options={"batch": 16, "hops": "chunks"},
        chips="v5p:16x1x1",
        neighbour={"chips": "v5p:4x4x1"},
    ),
    Case(
        name="SW122-hops-through-a-dim",
        model="llama3-8b num_layers=2",
        layout=mine("fsdp: fsdp\nexpert: context", "{fsdp: 64, expert: 2}"),
        options={"batch": 64, "hops": "chunks"},
        chips="v5p:4x4x8",
        neighbour={"layout": mine("fsdp: fsdp\nexpert: context", "{fsdp: 16, expert: 8}")},
    ),
    Case(
        name="SW204-small-model",
        layout=FSDP,
        chips="h100:8",
        neighbour={"model": "llama3-8b", "options": {"batch": 8, "length": 2048}},
    ),
    Case(
        name="SW206-longer-than-its-products",
        model="llama3-8b",
        layout=mine("data: data\nfsdp: fsdp", "{data: 2, fsdp: auto}"),
        options={"batch": 16, "length": 512},
        chips="h100:2x8",
        neighbour={"options": {"batch": 16, "length": 4096}},
    ),
    Case(
        name="SW207-out-of-a-node",
        layout=FSDP,
        options={"batch": 16},
        chips="mi325x:2x8",
        neighbour={"chips": "mi300x:2x8"},
    ),
    Case(
        name="SW208-recomputed",
        model="llama3-8b",
        layout=FSDP,
        options={"batch": 64},
        chips="h100:8x8",
        neighbour={"options": {"batch": 64, "remat": "none"}},
    ),
    Case(
        name="SW205-awaited",
        model="llama3-8b",
        layout=FSDP,
        options={
            "batch": 16,
            "length": 4096,
            "engine": "torch",
            "remat": "dots,host=mlp.gate,residual.stream@:16+full",
        },
        chips="h100:8",
        neighbour={"options": {"batch": 16, "length": 4096, "engine": "torch", "remat": "host=residual.stream"}},
    ),
    Case(
        name="SW205-link-without-a-figure",
        model="llama3-8b",
        layout=FSDP,
        options={"batch": 8, "length": 4096, "remat": "host=mlp.gate"},
        chips="tpu7x:2x2x1",
        neighbour={"chips": "v6e:2x4"},
    ),
)
