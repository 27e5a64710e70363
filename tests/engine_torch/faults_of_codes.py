"""Faults put on purpose into what sends tokens as codes and keeps weights as codes, one for each rule, by name.

Those of ``SentRows`` are of the core, so that both engines have them; the others are of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.dispatch import SentRows
from shardwright.core.recipes.formats import E5M2
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_torch.experts import exchange, experts
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.lowering import coded
from shardwright.engine_torch.lowering.updates import Updated
from shardwright.engine_torch.model.stage import Stage
from shardwright.training.optimizer import OptimizerOptions
from tests.engine_torch.training import NamedBox, RankRun, kept_after, train

Patch = Callable[[pytest.MonkeyPatch], None]


def _change_sent(patch: pytest.MonkeyPatch, change: Callable[[SentRows, SentRows], SentRows]) -> None:
    """``change(given, of_layer)``: of all layers, and of one."""
    right = SentRows.in_layer

    def wrong(sent: SentRows, quantized: Collection[str]) -> SentRows:
        return change(sent, right(sent, quantized))

    patch.setattr(SentRows, "in_layer", wrong)


def tokens_sent_as_they_are(patch: pytest.MonkeyPatch) -> None:
    _change_sent(patch, lambda _, of_layer: replace(of_layer, tokens=None))


def cotangents_sent_as_they_are(patch: pytest.MonkeyPatch) -> None:
    _change_sent(patch, lambda _, of_layer: replace(of_layer, cotangents=None))


def high_layers_read_codes(patch: pytest.MonkeyPatch) -> None:
    _change_sent(patch, lambda sent, _: sent)


def tokens_in_another_format(patch: pytest.MonkeyPatch) -> None:
    def other(quantizer: Quantizer | None) -> Quantizer | None:
        return None if quantizer is None else replace(quantizer, dtype=E5M2)

    _change_sent(patch, lambda _, of_layer: replace(of_layer, tokens=other(of_layer.tokens)))


def outputs_sent_back_as_codes(patch: pytest.MonkeyPatch) -> None:
    """What is combined is sent in the dtype of the computation."""

    def wrong(rows: torch.Tensor, routes: exchange.Routes, peers: Peers, quantizer: Quantizer | None = None) -> Any:
        back = rows[routes.unsorted_R]
        return exchange._all_to_all(back, routes.received_D, routes.sent_D, peers, quantizer, quantizer)

    patch.setattr(experts, "from_experts", wrong)


def cotangents_of_tokens_sent_back_as_codes(patch: pytest.MonkeyPatch) -> None:
    """They are summed over the experts of a token."""

    def wrong(rows: torch.Tensor, routes: exchange.Routes, peers: Peers, quantizer: Quantizer | None = None) -> Any:
        received = exchange._all_to_all(rows, routes.sent_D, routes.received_D, peers, quantizer, quantizer)
        return received[routes.sorted_R]

    patch.setattr(experts, "to_experts", wrong)


def codes_not_made_again(patch: pytest.MonkeyPatch) -> None:
    """A step leaves the codes of the initial weights."""
    right = Stage.rest_as_codes

    def once(stage: Stage, masters: Mapping[str, torch.Tensor]) -> None:
        if not all(group.resting for group in stage.resting.values()):
            right(stage, masters)

    patch.setattr(Stage, "rest_as_codes", once)


def amaxes_of_own_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(coded, "agreed_amax", lambda *_: None)


def updated_parts_not_gathered(patch: pytest.MonkeyPatch) -> None:
    """Where ranks update parts of weights, codes are of a rank's own part."""

    def wrong(updated: Updated, weights: Mapping[str, torch.Tensor]) -> None:
        own = {key: part.clone() for key, part in updated.own_parts(weights).items()}
        for key in updated.keys:
            weights[key].zero_()
        for key, part in updated.own_parts(weights).items():
            part.copy_(own[key])

    patch.setattr(Updated, "gather", wrong)


def train_with(
    fault: str, plan: Plan, seed: int, options: OptimizerOptions, batches: Sequence[dict[str, np.ndarray]]
) -> RankRun:
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        return train(plan, seed, options, batches)


def kept_after_with(
    fault: str, plan: Plan, seed: int, options: OptimizerOptions, batches: Sequence[dict[str, np.ndarray]]
) -> tuple[tuple[NamedBox, ...], tuple[NamedBox, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        return kept_after(plan, seed, options, batches)
