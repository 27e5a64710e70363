"""Weights to published tensors and back."""

import numpy as np
import pytest

from shardwright.interop.hugging_face.weights.mapping import published_tensors
from shardwright.models import build
from tests.models.random_weights import random_weights
from tests.models.to_published import to_published


@pytest.mark.parametrize("model", ["llama3-test", "mixtral-test", "deepseek3-test"])
def test_a_round_trip_gives_the_same_bits(model: str) -> None:
    table = build(model, {"num_layers": "2"})
    ours = random_weights(table)
    published = {name: array for weight in table.weights for name, array in to_published(weight, ours[weight.name])}
    back = {name: np.zeros_like(array) for name, array in ours.items()}
    for tensor in published_tensors(table, "each"):
        array = published.pop(tensor.name)
        assert array.shape == tensor.shape
        (piece,) = tensor.pieces
        stacked = back[piece.weight.name]
        stacked[piece.box.slices] = piece.in_our_dims(np.ascontiguousarray(array).reshape(-1))
    assert not published
    for name, array in ours.items():
        np.testing.assert_array_equal(back[name], array, strict=True)


def test_published_tensors_have_outputs_first() -> None:
    table = build("deepseek3-test")
    ours = random_weights(table)

    def shapes(name: str) -> dict[str, tuple[int, ...]]:
        return {key: array.shape for key, array in to_published(table.weight(name), ours[name])}

    assert shapes("dense_layers.attention.kv_up") == {"model.layers.0.self_attn.kv_b_proj.weight": (1024, 16)}
    assert shapes("embedding.tokens") == {"model.embed_tokens.weight": (2048, 128)}
    experts = shapes("moe_layers.moe.down")
    assert len(experts) == 3 * 16
    assert experts["model.layers.3.mlp.experts.15.down_proj.weight"] == (128, 128)
    q = dict(to_published(table.weight("moe_layers.attention.q_up"), ours["moe_layers.attention.q_up"]))
    np.testing.assert_array_equal(
        q["model.layers.2.self_attn.q_b_proj.weight"][192 + 5], ours["moe_layers.attention.q_up"][1, :, 1, 5]
    )
