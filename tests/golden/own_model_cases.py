"""The cases of findings about models of users' own."""

from __future__ import annotations

from tests.golden.findings_case import Case

OF_OWN_MODELS: tuple[Case, ...] = (
    Case(
        name="SW107-several-matrices-in-one-dim",
        table="qkv",
        layout="tp",
        options={"batch": 8, "length": 16, "mesh_sizes": {"tensor": 2}, "engine": "torch"},
        neighbour={
            "layout": "fsdp",
            "options": {"batch": 8, "length": 16, "mesh_sizes": {"fsdp": 2}, "engine": "torch"},
        },
    ),
)
