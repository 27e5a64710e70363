"""Small programs of random operations, with what a family may have: norms of heads, biases, caps, latents, norms after a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from shardwright.core.program.draft import Draft
from shardwright.core.program.part import Part
from shardwright.core.program.program import Program, Value
from shardwright.models.layers.attention import Masks, masks
from shardwright.models.layers.ends import batch_fields, embedding
from shardwright.models.parts.rope import Rope

SIZES = {"M": 8, "H": 4, "K": 2, "D": 4, "Q": 6, "F": 12, "V": 32}
EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What is drawn of a program: ``has`` answers the same in each of its layers."""

    seed: int
    faulty: float = 0.0
    """How often a bias is added to one summand of a sum, or a norm taken of it."""

    def has(self, feature: str, probability: float = 0.5) -> bool:
        return Random(f"{self.seed} {feature}").random() < probability

    def pick(self, feature: str, *options: str) -> str:
        return Random(f"{self.seed} {feature}").choice(options)


def drawn_program(drawing: Drawing) -> Program:
    """A program. Raises InputError where a fault is drawn."""
    draft = Draft(sizes=SIZES, initializer_stddev=0.02)
    draft.section("ends")
    batch = batch_fields(draft)
    stream = embedding(draft, batch)
    draft.section("attention")
    of_all = masks(draft, batch)
    stream = draft.layers("layers", 1, lambda stream: _layer(draft, stream, of_all, drawing), stream)
    draft.section("ends")
    _logits(draft, stream, batch)
    return draft.finished()


def _layer(draft: Draft, stream: Value, masks: Masks, drawing: Drawing) -> Value:
    residual = draft.part("residual")
    normed = residual.norm(stream, "norm", eps=EPS)
    attended = _heads(draft.part("attention"), normed, masks, drawing)
    if drawing.has("both parts of one norm", 0.3):
        added = _hidden(draft.part("mlp"), normed, drawing)
        return residual.add(stream, attended, added, name="stream")
    attended = _after(residual, attended, "attention", drawing)
    stream = residual.add(stream, attended, name="middle")
    added = _hidden(draft.part("mlp"), residual.norm(stream, "second_norm", eps=EPS), drawing)
    return residual.add(stream, _after(residual, added, "mlp", drawing), name="stream")


def _after(residual: Part, x: Value, name: str, drawing: Drawing) -> Value:
    """What is done to a part's output where it is complete."""
    if not drawing.has(f"{name} after"):
        return x
    x = residual.take(x, f"{name}_output")
    if drawing.has(f"{name} bias after"):
        x = residual.bias(x, f"{name}_bias", "M")
    return residual.norm(x, f"{name}_output_norm", eps=EPS)


def _heads(attention: Part, normed: Value, masks: Masks, drawing: Drawing) -> Value:
    x = attention.take(normed, "input")

    def projected(name: str, heads: str) -> Value:
        if heads == "H" and drawing.has(f"{name} latent"):
            latent = attention.product("B L M, M Q -> B L Q", x, f"{name}_down")
            if drawing.has(f"{name} latent bias"):
                latent = attention.bias(latent, f"{name}_down_bias", "Q")
            latent = attention.norm(latent, f"{name}_latent_norm", eps=EPS) if drawing.has(f"{name} norm") else latent
            y = attention.product("B L Q, Q H D -> B L H D", latent, f"{name}_up")
        else:
            y = attention.product(f"B L M, M {heads} D -> B L {heads} D", x, name)
        if drawing.has(f"{name} bias"):
            y = attention.bias(y, f"{name}_bias", drawing.pick(f"{name} bias of", "D", f"{heads} D"))
        if drawing.has(f"{name} norm of heads"):
            y = attention.norm(y, f"{name}_norm", eps=EPS)
        y = attention.scale(y, 0.7) if drawing.has(f"{name} scale", 0.2) else y
        y = attention.cap(y, 2.0) if drawing.has(f"{name} cap", 0.2) else y
        return attention.rotate(y, masks.positions, f"{name}_made", rope=Rope(theta=10.0))

    q, k, v = projected("q", "H"), projected("k", "K"), projected("v", "K")
    q = attention.take(q, "q_attended", "B T H D")
    k, v = attention.take(k, "k_attended", "B S K D"), attention.take(v, "v_attended", "B S K D")
    a = attention.attend(q, k, v, "attended", masks=masks.attended, scale=0.5)
    a = attention.take(a, "output", "B L H D")
    if drawing.has("gate of heads", 0.3):
        a = attention.gate(projected("gate", "H"), a, "gated")
    out = attention.product("B L H D, H D M -> B L M", a, "o", "projected")
    if drawing.has("bias of a summand", drawing.faulty):
        out = attention.bias(out, "o_bias", "M", "biased")
    if drawing.has("norm of a summand", drawing.faulty):
        out = attention.norm(out, "o_norm", "normed", eps=EPS)
    return out


def _hidden(mlp: Part, normed: Value, drawing: Drawing) -> Value:
    x = mlp.take(normed, "input")
    up = mlp.product("B L M, M F -> B L F", x, "up", "up")
    up = mlp.bias(up, "up_bias", "F", "biased") if drawing.has("bias of hidden units") else up
    if drawing.has("gated"):
        hidden = mlp.gate(mlp.product("B L M, M F -> B L F", x, "gate", "gate"), up, "hidden")
    else:
        hidden = mlp.cap(up, 1.5, "hidden")
    return mlp.product("B L F, F M -> B L M", hidden, "down", "projected")


def _logits(draft: Draft, stream: Value, batch: Mapping[str, Value]) -> None:
    residual, logits = draft.part("residual"), draft.part("logits")
    targets, valid = logits.take(batch["targets"], "targets"), logits.take(batch["valid"], "valid")
    x = logits.take(residual.norm(stream, "final_norm", eps=EPS), "input")
    scores = logits.product("B L M, M V -> B L V", x, "kernel", "scores")
    logits.loss(logits.cap(scores, 30.0, "capped"), targets, valid)
