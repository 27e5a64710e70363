"""Keys that are gathered, go round a ring, or are exchanged for heads: always the attention of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.engine_jax.attending import Case, batch, on_one_device, plan_of, program_of, weights_of

LAYOUT = """name: mine
mesh: {{{mesh}}}
roles: {{{roles}}}
move: {{attention: {move}}}
"""
CONTEXT = {"mesh": "context: 4", "roles": "context: context"}
WITH_ROWS = {"mesh": "fsdp: 2, context: 4", "roles": "fsdp: fsdp, context: context"}
WITH_HEADS = {"mesh": "context: 2, tensor: 4", "roles": "context: context, tensor: tensor"}
TWO_AXES = {
    "mesh": "context: 2, fsdp: 2, expert: 2",
    "roles": "context: context, fsdp: fsdp, expert: {elsewhere: context, moe: expert}",
}


def close(ours, expected) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), ours, expected)


@pytest.mark.parametrize("move", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("model", ["grouped", "latent"])
@pytest.mark.parametrize("where", [WITH_ROWS, WITH_HEADS, TWO_AXES], ids=["rows", "heads", "two axes"])
def test_it_is_the_attention_of_one_device(where: dict[str, str], model: str, move: str) -> None:
    if move == "ulysses" and where is WITH_HEADS:
        where = {**where, "mesh": "context: 2, tensor: 2"}
    case = Case(model=model, layout=LAYOUT.format(**where, move=move))
    close(program_of(case)(weights_of(model), batch()), on_one_device(model))
