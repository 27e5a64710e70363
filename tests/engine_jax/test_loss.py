"""The loss over valid tokens, and its gradient, against PyTorch's cross-entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from shardwright.engine_jax.layers.loss import summed_cross_entropy

ROWS, LENGTH, VOCAB = 3, 7, 11


def inputs(scale: float = 3.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, targets and valid tokens. One row has no valid token; the targets of invalid tokens are out of the vocabulary."""
    rng = np.random.default_rng(0)
    logits_BLV = (scale * rng.normal(size=(ROWS, LENGTH, VOCAB))).astype(np.float32)
    targets_BL = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    valid_BL = rng.random((ROWS, LENGTH)) < 0.6
    valid_BL[1] = False
    targets_BL[~valid_BL] = -100
    return logits_BLV, targets_BL, valid_BL


def test_loss_and_gradient_are_those_of_pytorch() -> None:
    for scale in (3.0, 1e4):
        logits_BLV, targets_BL, valid_BL = inputs(scale)
        theirs = torch.tensor(logits_BLV, requires_grad=True)
        their_loss = torch.nn.functional.cross_entropy(
            theirs.reshape(-1, VOCAB), torch.tensor(targets_BL).long().reshape(-1), ignore_index=-100, reduction="sum"
        )
        their_loss.backward()
        assert theirs.grad is not None
        loss, cotangent = jax.jit(jax.value_and_grad(summed_cross_entropy))(logits_BLV, targets_BL, valid_BL)
        np.testing.assert_allclose(loss, their_loss.item(), rtol=1e-6)
        np.testing.assert_allclose(cotangent, theirs.grad, rtol=0, atol=1e-6)
        assert not np.any(cotangent[~valid_BL])


def test_narrow_logits_are_summed_wide() -> None:
    logits_BLV, targets_BL, valid_BL = inputs()
    narrow_BLV = jnp.asarray(logits_BLV, jnp.bfloat16)
    loss = summed_cross_entropy(narrow_BLV, jnp.asarray(targets_BL), jnp.asarray(valid_BL))
    assert loss.dtype == jnp.float32
    wide = summed_cross_entropy(narrow_BLV.astype(jnp.float32), jnp.asarray(targets_BL), jnp.asarray(valid_BL))
    assert float(loss) == float(wide)


def test_no_valid_token_is_no_loss() -> None:
    logits_BLV, targets_BL, valid_BL = inputs()
    assert float(summed_cross_entropy(logits_BLV, targets_BL, np.zeros_like(valid_BL))) == 0.0
