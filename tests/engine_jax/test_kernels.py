"""The kernels of accelerators, interpreted on CPU, equal plain softmax attention.

Rows are in the order of the text, as these kernels require.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.core.plan.attention_kernels import ChosenKernel
from shardwright.core.resolution.row_order import IN_ORDER
from shardwright.engine_jax.attention import attend, kernels
from shardwright.engine_jax.attention.kernels import backend_of, splash, triton
from shardwright.engine_jax.attention.scores import AttentionMask
from shardwright.engine_jax.io.layer_io import AttentionLinks
from shardwright.engine_jax.io.recomputation import ATTENDED
from tests.engine_jax.attention_cases import Shape, far, made, reference_attention, with_cotangents
from tests.engine_jax.attention_layer import batch, on_one_device, plan_of, program_of, weights_of
from tests.engine_jax.test_attention_under_context import WITH_ROWS, balanced, case_of, close
from tests.matrix import rest

SCALE = 0.2
GROUPED = Shape(rows=2, keys=256, heads=4, kv_heads=2, width=16, value_width=16)
LATENT = Shape(rows=1, keys=256, heads=2, kv_heads=2, width=24, value_width=16)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SPLASH_BLOCK", 128)


def by_splash(q_BTHD, k_BSKD, v_BSKE, mask: AttentionMask, scale: float) -> jax.Array:
    return splash(q_BTHD, k_BSKD, v_BSKE, mask.with_visible_range(), scale, interpret=True)


@pytest.mark.parametrize(
    "shape",
    [
        GROUPED,
        LATENT,
        replace(GROUPED, rows=1, keys=384, places=tuple(range(128, 256))),
        replace(LATENT, keys=512, places=(*range(128), *range(384, 512))),
    ],
    ids=["grouped", "latent", "queries from the middle of a row", "head and tail"],
)
def test_splash_is_plain_softmax(shape: Shape) -> None:
    case = made(shape)
    assert far(with_cotangents(by_splash, case, SCALE), reference_attention(case, SCALE)) < 1e-6


def test_splash_skips_fully_masked_blocks() -> None:
    """Their keys are never read: they may be NaN, and NaN times zero would be NaN."""
    case = made(replace(GROUPED, rows=1, keys=384, places=tuple(range(128, 256))), num_documents=1)
    expected = with_cotangents(by_splash, case, SCALE)
    masked_1S11 = (np.arange(384) >= 256)[None, :, None, None]
    k_BSKD, v_BSKE = (jnp.where(masked_1S11, jnp.nan, array) for array in (case.k_BSKD, case.v_BSKE))
    out, cotangents = with_cotangents(by_splash, case._replace(k_BSKD=k_BSKD, v_BSKE=v_BSKE), SCALE)
    jax.tree.map(np.testing.assert_array_equal, (out, cotangents), expected)


@pytest.mark.parametrize(("move", "in_text_order"), [rest("gather", False), rest("gather", True), ("ulysses", True)])
def test_under_context_splash_is_the_attention_of_one_device(
    move: str, in_text_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of balanced rows are reordered to the order of the text before the kernel."""
    monkeypatch.setattr(attend, "splash", partial(splash, interpret=True))
    case = case_of(WITH_ROWS, "latent", move, balanced=not in_text_order)
    case = replace(case, way=ChosenKernel(name="splash", block=0, why="the test wants it"), longer=16)
    chunks = plan_of(case).row_chunks
    assert (chunks == (0,)) == in_text_order
    added, (of_stream, of_weights) = program_of(case)(weights_of("latent"), balanced(chunks, batch(16)))
    expected, (of_expected_stream, of_expected_weights) = on_one_device("latent", 16)
    along_rows = balanced(chunks, {"added": expected, "stream": of_expected_stream})
    close((added, of_stream), (along_rows["added"], along_rows["stream"]))
    assert far(of_weights, of_expected_weights) < 1e-5


@pytest.mark.parametrize("shape", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_triton_is_plain_softmax(shape: Shape) -> None:
    case = made(shape)
    assert far(with_cotangents(partial(triton, interpret=True), case, SCALE), reference_attention(case, SCALE)) < 1e-6


@pytest.mark.parametrize(
    ("platform", "with_cudnn", "expected"),
    [
        ("cpu", True, "cpu"),
        ("tpu", True, "tpu"),
        ("gpu", True, "gpu with cuDNN"),
        ("gpu", False, "gpu"),
        ("another", True, "cpu"),
    ],
)
def test_the_mesh_determines_the_backend(
    platform: str, with_cudnn: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels, "installed_version", lambda package: "9.10" if with_cudnn and package == "nvidia-cudnn-cu13" else None
    )
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    assert backend_of(cast(Any, mesh)) == expected


@pytest.mark.parametrize(
    ("chunks", "keys", "causal"), [(IN_ORDER, 8, True), (IN_ORDER, 16, False), ((0, 3, 1, 2), 8, False)]
)
def test_cudnn_is_causal_only_for_all_tokens_of_a_row_in_text_order(
    chunks: tuple[int, ...], keys: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = []
    monkeypatch.setattr(attend, "cudnn", lambda *_, causal: received.append(causal))
    links = AttentionLinks(kernel=ChosenKernel(name="cudnn", block=0, why=""), chunks=chunks)
    q, k = jnp.zeros((1, 8, 2, 4)), jnp.zeros((1, keys, 2, 4))
    attend.attend(q, k, k, cast(AttentionMask, None), SCALE, links)
    assert received == [causal]


@pytest.mark.parametrize(("kept", "times"), [((), 2), ((ATTENDED,), 1)])
def test_triton_is_not_computed_again_where_its_output_is_kept(kept: tuple[str, ...], times: int) -> None:
    """How often the kernel's forward pass is in the program of a gradient, as JAX differentiates it."""
    case = made(GROUPED)

    def attended(q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array) -> jax.Array:
        return triton(q_BTHD, k_BSKD, v_BSKE, case.mask, SCALE, interpret=True)

    layer = jax.checkpoint(attended, policy=jax.checkpoint_policies.save_only_these_names(*kept))
    gradient = jax.grad(lambda *operands: layer(*operands).sum(), argnums=(0, 1, 2))
    program = jax.jit(gradient).trace(case.q_BTHD, case.k_BSKD, case.v_BSKE).jaxpr
    assert str(program).count("name=mha_forward") == times
