"""Drawn layers of a transformer, and what each gives in plain PyTorch: functions of ``torch.nn.functional``, one sequence after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch.nn import functional

from shardwright.engine_torch.modules import RotaryPositionEmbedding, TransformerLayer
from tests.engine_torch.attention_cases import KINDS, AttentionCase, Heads, arguments, drawn_case, expected

Weights = Mapping[str, torch.Tensor]
WITHOUT_SCORES = tuple(kind for kind in KINDS if kind != "arbitrary")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """``attention``: of the layer's tokens to themselves; ``cross``: to those of an encoder. ``rotary``: elements of a head that are rotated."""

    attention: AttentionCase
    cross: AttentionCase | None
    hidden: int
    units: int
    options: Mapping[str, Any]
    rotary: int
    interleaved: bool

    @property
    def layout(self) -> str:
        return self.attention.layout


def drawn_layer(seed: int, *, context: int = 1, tp: int = 1, kinds: Sequence[str] = WITHOUT_SCORES) -> LayerCase:
    draw = Random(seed)
    attention = drawn_case(seed, context * tp, kinds)
    channels = draw.choice([4, 8])
    # Sequence parallelism shards the first dim.
    layout = "sbhd" if tp > 1 and attention.layout == "bshd" else attention.layout
    attention = replace(
        attention,
        layout=layout,
        channels=(channels, channels),
        rooms=(attention.rooms[0],) * 2,
        real=(attention.real[0],) * 2,
    )
    cross = None
    shape = draw.choice(["plain", "plain", "parallel", "output norm", "decoder"])
    if shape == "decoder":
        kind = "padding" if layout == "thd" else draw.choice(["no_mask", "padding"])
        unit = 2 * context * tp
        lengths = [draw.randint(1, 4) * unit for _ in attention.rooms[0]]
        rooms = lengths if layout == "thd" else [lengths[0]] * len(lengths)
        real = [draw.randint(1, room) if kind == "padding" else room for room in rooms]
        of_queries = attention.real[0] if kind == "padding" else attention.rooms[0]
        if kind == "padding" and "padding" not in attention.kind:
            # Their queries have no padding, so the call has no lengths for them.
            attention = replace(attention, kind=f"padding_{attention.kind}".replace("_no_mask", ""), as_mask=False)
            attention = replace(attention, diagonal=None)
        cross = replace(
            attention,
            kind=kind,
            window=None,
            diagonal=None,
            rooms=(attention.rooms[0], rooms),
            real=(of_queries, real),
        )
        if kind == "no_mask" and "padding" in attention.kind:
            attention = replace(attention, kind="causal", real=attention.rooms, diagonal=None, window=None)
    options = {
        "normalization": draw.choice(["LayerNorm", "RMSNorm"]),
        "zero_centered_gamma": draw.random() < 0.3,
        "bias": draw.random() < 0.5,
        "activation": draw.choice(["gelu", "swiglu", "relu"]),
        "qk_norm_type": draw.choice([None, None, "RMSNorm", "LayerNorm", "L2Normalization"]),
        "qk_norm_before_rope": draw.random() < 0.5,
        "parallel_attention_mlp": shape == "parallel",
        "output_layernorm": shape == "output norm",
        "layer_type": "decoder" if shape == "decoder" else "encoder",
        "apply_residual_connection_post_layernorm": shape != "parallel" and draw.random() < 0.3,
    }
    return LayerCase(
        attention=attention,
        cross=cross,
        hidden=draw.choice([8, 12]),
        units=4 * draw.randint(2, 4),
        options=options,
        rotary=draw.choice([0, channels, channels // 2]),
        interleaved=draw.random() < 0.5,
    )


def layer_of(case: LayerCase, **options: Any) -> TransformerLayer:
    attention, cross = case.attention, case.cross
    of_cross = {} if cross is None else {"enc_dec_attn_mask_type": cross.kind, "enc_dec_window_size": cross.window}
    return TransformerLayer(
        case.hidden,
        case.units,
        attention.heads,
        attention.kv_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        kv_channels=attention.channels[0],
        self_attn_mask_type=attention.kind,  # pyright: ignore[reportArgumentType]
        window_size=attention.window,
        bottom_right_diagonal=attention.diagonal,
        attn_input_format=attention.layout,  # pyright: ignore[reportArgumentType]
        rotary_pos_interleaved=case.interleaved,
        **of_cross,
        **case.options,
        **options,
    )


def spread(layer: torch.nn.Module) -> None:
    """Give all parameters values of a size at which each matters."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in layer.parameters():
            one.copy_(torch.randn(one.shape, generator=generator) * (0.4 if one.dim() > 1 else 0.8))


def inputs(case: LayerCase) -> tuple[Heads, Heads | None]:
    """Of each sequence the tokens of the layer, and those of the encoder."""
    generator = torch.Generator().manual_seed(case.attention.seed)
    own = [torch.randn(room, case.hidden, generator=generator) for room in case.attention.rooms[0]]
    if case.cross is None:
        return own, None
    return own, [torch.randn(room, case.hidden, generator=generator) for room in case.cross.rooms[1]]


def call(case: LayerCase) -> dict[str, Any]:
    """The arguments of a call beside the tokens."""
    of_self = arguments(case.attention, None)
    found = {name: value for name, value in of_self.items() if "_kv" not in name}
    if isinstance(found.get("attention_mask"), tuple):
        found["attention_mask"] = found["attention_mask"][0]
    if case.cross is not None:
        of_cross = arguments(case.cross, None)
        if "attention_mask" in of_cross:
            found["enc_dec_attn_mask"] = of_cross["attention_mask"]
        found |= {name: value for name, value in of_cross.items() if "_kv" in name}
    if case.rotary:
        longest = max(max(rooms) for one in filter(None, (case.attention, case.cross)) for rooms in one.rooms)
        found["rotary_pos_emb"] = RotaryPositionEmbedding(case.rotary, interleaved=case.interleaved)(longest)
    return found


def plain(case: LayerCase, weights: Weights, own: Heads, encoder: Heads | None) -> Heads:
    """The output of each sequence."""
    options = case.options
    attended = _attention(case, case.attention, _under(weights, "self_attention."), own, own)
    if options["parallel_attention_mlp"]:
        return [x + y + _mlp(case, weights, x) for x, y in zip(own, attended, strict=True)]
    norm = "" if options["output_layernorm"] else "self_attention.layernorm_qkv."
    hidden = [_residual(case, weights, norm, x) + y for x, y in zip(own, attended, strict=True)]
    if case.cross is not None:
        assert encoder is not None
        attended = _attention(case, case.cross, _under(weights, "inter_attention."), hidden, encoder)
        norm = "inter_attention.layernorm_query."
        hidden = [_residual(case, weights, norm, x) + y for x, y in zip(hidden, attended, strict=True)]
    hidden = [_residual(case, weights, "layernorm_mlp.", x) + _mlp(case, weights, x) for x in hidden]
    if options["output_layernorm"]:
        hidden = [_norm(case, _under(weights, "layernorm."), x) for x in hidden]
    return hidden


def _residual(case: LayerCase, weights: Weights, module: str, x: torch.Tensor) -> torch.Tensor:
    """What a module's output is added to: what it has, or what its norm gives; the empty name has no norm."""
    if not module or not case.options["apply_residual_connection_post_layernorm"]:
        return x
    return _norm(case, _under(weights, f"{module}layer_norm_"), x)


def _under(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}


def _norm(case: LayerCase, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    scale = weights["weight"] + (1 if case.options["zero_centered_gamma"] else 0)
    if case.options["normalization"] == "RMSNorm":
        return functional.rms_norm(x, scale.shape, scale, 1e-5)
    return functional.layer_norm(x, scale.shape, scale, weights["bias"], 1e-5)


def _mlp(case: LayerCase, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    of_mlp = _under(weights, "layernorm_mlp.")
    x = _norm(case, _under(of_mlp, "layer_norm_"), x)
    hidden = functional.linear(x, of_mlp["fc1_weight"], of_mlp.get("fc1_bias"))
    match case.options["activation"]:
        case "swiglu":
            gate = functional.linear(x, of_mlp["fc1_gate_weight"], of_mlp.get("fc1_gate_bias"))
            hidden = functional.silu(gate) * hidden
        case "relu":
            hidden = functional.relu(hidden)
        case _:
            hidden = functional.gelu(hidden, approximate="tanh")
    return functional.linear(hidden, of_mlp["fc2_weight"], of_mlp.get("fc2_bias"))


def _attention(case: LayerCase, attention: AttentionCase, weights: Weights, own: Heads, other: Heads) -> Heads:
    cross = own is not other
    first = ["layernorm_query." if cross else "layernorm_qkv.", "layernorm_qkv."][not cross]
    norm = _under(_under(weights, first), "layer_norm_")
    normed = [_norm(case, norm, x) for x in own] if norm else own
    first = first if norm else "qkv."

    def projected(name: str, tokens: Heads) -> Heads:
        of = "key_value." if cross and name != "query" else first
        weight, bias = weights[f"{of}{name}_weight"], weights.get(f"{of}{name}_bias")
        return [functional.linear(x, weight, bias).unflatten(-1, (-1, attention.channels[0])) for x in tokens]

    q, k, v = projected("query", normed), projected("key", other if cross else normed), None
    v = projected("value", other if cross else normed)
    before = case.options["qk_norm_before_rope"]
    for norm_first in (True, False):
        if norm_first == before:
            q, k = (
                [_head_norm(case, _under(weights, f"{one}_norm."), x) for x in side]
                for one, side in (("q", q), ("k", k))
            )
        if norm_first:
            q, k = [_rotated(case, x) for x in q], [_rotated(case, x) for x in k]
    out = expected(attention, q, k, v, None)
    return [functional.linear(x.flatten(1), weights["proj.weight"], weights.get("proj.bias")) for x in out]


def _head_norm(case: LayerCase, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    match case.options["qk_norm_type"]:
        case "RMSNorm":
            return functional.rms_norm(x, x.shape[-1:], weights["weight"], 1e-6)
        case "LayerNorm":
            return functional.layer_norm(x, x.shape[-1:], weights["weight"], weights["bias"], 1e-6)
        case "L2Normalization":
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        case _:
            return x


def _rotated(case: LayerCase, x: torch.Tensor) -> torch.Tensor:
    """By multiplication of complex numbers."""
    if not case.rotary:
        return x
    turned, rest = x[..., : case.rotary], x[..., case.rotary :]
    pairs = turned.unflatten(-1, (-1, 2)) if case.interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    frequencies = torch.tensor([10000.0 ** (-2 * i / case.rotary) for i in range(case.rotary // 2)], dtype=x.dtype)
    angles = torch.arange(len(x))[:, None, None] * frequencies
    product = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    found = torch.view_as_real(product)
    found = found.flatten(-2) if case.interleaved else found.transpose(-1, -2).flatten(-2)
    return torch.cat([found, rest], dim=-1)
