"""The cases of SW110: pipeline stages, their schedules and their microbatches."""

from __future__ import annotations

from tests.golden.findings_case import Case, mine

EIGHT = {"devices": 8}

OF_STAGES: tuple[Case, ...] = (
    Case(
        name="SW110-units",
        layout="pp",
        options={"devices": 16, "mesh_sizes": {"stage": 16}, "microbatches": 16, "batch": 64},
        neighbour={"options": {"devices": 8, "mesh_sizes": {"stage": 8}, "microbatches": 16, "batch": 64}},
    ),
    Case(
        name="SW110-microbatches-of-a-schedule",
        layout="pp",
        options={
            "devices": 8,
            "mesh_sizes": {"stage": 4},
            "batch": 16,
            "microbatches": 4,
            "schedule": "dualpipev",
            "engine": "torch",
        },
        neighbour={
            "options": {
                "devices": 8,
                "mesh_sizes": {"stage": 4},
                "batch": 16,
                "microbatches": 8,
                "schedule": "dualpipev",
                "engine": "torch",
            }
        },
    ),
    Case(
        name="SW110-rounds",
        layout=mine("x: {elsewhere: stage, virtual: 2}\nfsdp: fsdp", "{x: 2, fsdp: auto}"),
        options={"devices": 4, "batch": 30, "microbatches": 5, "engine": "torch"},
        neighbour={"options": {"devices": 4, "batch": 24, "microbatches": 6, "engine": "torch"}},
    ),
    Case(
        name="SW110-virtual",
        layout=mine("x: {elsewhere: stage, virtual: 3, schedule: zbv}\nfsdp: fsdp", "{x: 2, fsdp: auto}"),
        options={"devices": 4, "batch": 16, "microbatches": 4, "engine": "torch"},
        neighbour={
            "layout": mine("x: {elsewhere: stage, virtual: 2, schedule: zbv}\nfsdp: fsdp", "{x: 2, fsdp: auto}")
        },
    ),
    Case(
        name="SW110-stages-given",
        layout="pp",
        options={"devices": 8, "mesh_sizes": {"stage": 4}, "batch": 16, "microbatches": 4, "stages": "Et|t*2|t*2L"},
        neighbour={
            "options": {
                "devices": 8,
                "mesh_sizes": {"stage": 4},
                "batch": 16,
                "microbatches": 4,
                "stages": "Et|t*2|t*2|tL",
            }
        },
    ),
    Case(
        name="SW110-no-stages",
        layout="fsdp",
        options={"devices": 8, "schedule": "gpipe"},
        neighbour={"options": {"devices": 8}},
    ),
    Case(
        name="SW110-tied",
        model="llama3-1b",
        layout="pp",
        options={**EIGHT, "mesh_sizes": {"stage": 2}, "microbatches": 4, "batch": 16, "engine": "torch"},
        neighbour={
            "options": {
                **EIGHT,
                "mesh_sizes": {"stage": 2},
                "microbatches": 4,
                "batch": 16,
                "engine": "torch",
                "schedule": "zbv",
            }
        },
    ),
    Case(
        name="SW110-microbatches",
        model="llama3-8b",
        layout="pp",
        options={"devices": 16},
        neighbour={"options": {"devices": 16, "microbatches": 2}},
    ),
)
