"""Layers with one operation that is not as it should be: each is refused with its reason, or computes other logits.

The text of a layer is changed in one place. A program that is refused names what is wrong; one that is not gives logits that differ from those of
the layer as it is, which ``test_programs.py`` compares with transformers.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shardwright.core.findings.errors import InputError
from shardwright.core.program.program import Program
from shardwright.core.program.rows import rows_of
from shardwright.models.deepseek3.table import PUBLISHED as DEEPSEEK3
from shardwright.models.layers import attention, decoder, ends, experts, feed_forward, latent_attention
from shardwright.models.llama3.table import PUBLISHED as LLAMA3
from shardwright.models.mixtral.table import PUBLISHED as MIXTRAL
from tests.models.evaluated import computed
from tests.models.test_sums import drawn_batch, drawn_params, model

PUBLISHED = {"llama3": LLAMA3, "mixtral": MIXTRAL, "deepseek3": DEEPSEEK3}
OTHER_LOGITS = ""
"""No refusal: the logits differ."""

BROKEN = [
    # Dims.
    (attention, '"B L M, M H D -> B L H D"', '"B L M, M H D -> B L H"', "'D' (head_dim) is in the weight alone"),
    (attention, '"B L M, M H D -> B L H D"', '"B L M, M H D -> B H D"', "'L' (length) is in the input alone"),
    (attention, '"B L M, M H D -> B L H D"', '"B L M, H D -> B L H D"', "'M' (embed) is in the input alone"),
    (attention, '"B L M, M H D -> B L H D"', '"B L M, M H D -> B L M H D"', "contracts no dim"),
    (attention, '"B L M, M H D -> B L H D"', '"B L M, M H D -> B L H W"', "'W' is no dim"),
    (attention, '"B L M, M H D -> B L H D"', '"B L M, M H H -> B L H D"', "has 'H' (heads) twice"),
    (attention, '"B L M, M H D -> B L H D"', '"B L M M H D -> B L H D"', "is not 'input, weight -> output'"),
    (attention, '"B L M, M H D -> B L H D"', '"B L M, M L D -> B L D"', "the weight has 'L' (length)"),
    (attention, '"B L M, M H D -> B L H D"', '"B L M, M F D -> B L F D"', "is taken as B T H D"),
    (attention, '"B L M, M H D -> B L H D"', '"B L M, M N D -> B L N D"', "'N' (kv_lora) has no size"),
    (attention, 'x, "k")', 'x, "q")', "weight 'attention.q' is used twice in a layer"),
    (attention, 'x, "k")', 'x, "key")', "weight 'attention.key' has no published name. Did you mean"),
    (attention, 'x, "v", "values")', 'x, "v", "queries")', "two values of a layer are called 'attention.queries'"),
    (attention, '"o", "projected")', '"q", "projected")', "weight 'attention.q' is used twice in a layer"),
    # Where tokens are needed, and in which component.
    (
        attention,
        'a = attention.take(a, "output", "B L H D")',
        "",
        "its input is 'attention.attended', which has dims B T H D",
    ),
    (attention, 'q = attention.take(q, "queries_attended", "B T H D")', "", "take queries to T, keys and values to S"),
    (attention, 'v = attention.take(v, "values_attended", "B S K D")', "", "take queries to T, keys and values to S"),
    (attention, '"keys_attended", "B S K D"', '"keys_attended", "B S K"', "is taken as B S K"),
    (
        attention,
        'attention.take(residual.norm(stream, "attention_norm", eps=architecture.norm_eps), "input")',
        'residual.norm(stream, "attention_norm", eps=architecture.norm_eps)',
        "Take it into attention first",
    ),
    (attention, 'positions=fields["positions"]', 'positions=fields["segments"]', OTHER_LOGITS),
    (
        attention,
        '(("q", "B T"), ("kv", "B S"))',
        '(("kv", "B S"), ("q", "B T"))',
        "the masks of attention are positions and segments",
    ),
    # The order of operations.
    (attention, 'residual.norm(stream, "attention_norm", eps=architecture.norm_eps)', "stream", OTHER_LOGITS),
    (
        attention,
        'q = attention.rotate(q, masks.positions, "queries", rope=architecture.rope)',
        'q = attention.named(q, "queries")',
        OTHER_LOGITS,
    ),
    (
        attention,
        'k = attention.rotate(k, masks.positions, "keys", rope=architecture.rope)',
        'k = attention.named(k, "keys")',
        OTHER_LOGITS,
    ),
    (
        attention,
        'x, "v", "values")',
        'x, "v")\n    v = attention.rotate(v, masks.positions, "values", rope=architecture.rope)',
        OTHER_LOGITS,
    ),
    (attention, "attend(q, k, v,", "attend(q, v, k,", OTHER_LOGITS),
    (attention, "scale=form.head_dim**-0.5", "scale=form.head_dim**-1", OTHER_LOGITS),
    (attention, "window=form.window", "window=3", OTHER_LOGITS),
    (feed_forward, 'mlp.gate(gate, up, "hidden"', 'mlp.gate(up, gate, "hidden"', OTHER_LOGITS),
    (
        feed_forward,
        'mlp.gate(gate, up, "hidden", function="silu")',
        "up",
        "'mlp.gate' is made by product, and nothing uses it",
    ),
    (feed_forward, '"B L F, F M -> B L M"', '"B L F, F M -> B L F M"', "contracts no dim"),
    (feed_forward, 'hidden, "down"', 'up, "down"', "'mlp.hidden' is made by gate, and nothing uses it"),
    (feed_forward, 'mlp.take(normed, "input")', "normed", "Take it into mlp first"),
    (
        feed_forward,
        'return mlp.product("B L F, F M -> B L M", hidden, "down", "projected")',
        'y = mlp.product("B L F, F M -> B L M", hidden, "down", "output")\n    return mlp.norm(y, "n", "projected", eps=1e-5)',
        "norm of 'mlp.output', which is a sum over mlp",
    ),
    (
        feed_forward,
        'return mlp.product("B L F, F M -> B L M", hidden, "down", "projected")',
        'y = mlp.product("B L F, F M -> B L M", hidden, "down", "output")\n    return mlp.bias(y, "b", "M", "projected")',
        "a bias would be added by each",
    ),
    # The two parts of a layer.
    (
        decoder,
        'feed_forward(draft, normed, "mlp"',
        'feed_forward(draft, stream, "mlp"',
        "is made by norm, and nothing uses it",
    ),
    (
        decoder,
        'stream = residual.add(stream, attended, name="middle")',
        "",
        "'attention.projected' is made by product, and nothing uses it",
    ),
    (decoder, 'residual.norm(stream, "feed_forward_norm", eps=architecture.norm_eps)', "stream", OTHER_LOGITS),
    (decoder, 'name="stream")\n    assert', 'name="other")\n    assert', "The next layer needs 'residual.stream'"),
    (ends, 'residual.norm(stream, "final_norm", eps=architecture.norm_eps)', "stream", OTHER_LOGITS),
    (ends, 'x, "kernel"', 'x, "embedding.tokens"', "weight 'embedding.tokens' is (32, 8) and (8, 32)"),
    # Experts.
    (experts, 'combine(y, weights, experts, "combined")', 'combine(y, experts, experts, "combined")', "is combined by"),
    (experts, 'router.take(chosen, "weights", "B G U A")', "chosen", "is combined by"),
    (experts, 'router.take(y, "returned", "B G U A M")', "y", "Take it into router first"),
    (experts, '"dispatched", "X B G C M"', '"dispatched", "X B G M"', "is taken as X B G M"),
    (experts, 'router.take(experts, "grouped_experts", "B G U A")', "experts", "is dispatched by"),
    (experts, "top_k=form.top_k", "top_k=99", "99 of 4 experts are chosen"),
    (experts, "normalized=form.normalized", "normalized=False", OTHER_LOGITS),
    (experts, 'x, "grouped", "B G U M"', 'x, "grouped", "B G M"', "is taken as B G M"),
    # Latent attention.
    (latent_attention, 'attention.norm(q, "q_norm", eps=eps)', "q", OTHER_LOGITS),
    (latent_attention, 'compressed = attention.norm(compressed, "kv_norm", eps=eps)', "", OTHER_LOGITS),
    (
        latent_attention,
        "attention.rotate(rotary, masks.positions, rope=rope), like=latent",
        "rotary, like=latent",
        OTHER_LOGITS,
    ),
    (
        latent_attention,
        'plain, rotary, name="keys_attended"',
        'plain, name="keys_attended"',
        "the parts have 4 elements together",
    ),
    (latent_attention, "* rope.score_factor", "", OTHER_LOGITS),
    (
        latent_attention,
        "D=form.nope_dim, E=form.value_dim",
        "D=form.nope_dim, E=form.rope_dim",
        "has 10 elements, and is split into 4 + 2",
    ),
    (
        latent_attention,
        'plain, attention.rotate(rotary, masks.positions, rope=rope), name="queries"',
        'plain, rotary, name="queries"',
        OTHER_LOGITS,
    ),
]
MODEL_OF = {experts: "mixtral", latent_attention: "deepseek3"}
FUNCTIONS = (
    "grouped_query_attention",
    "latent_attention",
    "feed_forward",
    "routed_experts",
    "logits_and_loss",
    "masks",
    "layer",
)


@cache
def source(module: ModuleType) -> str:
    return inspect.getsource(module)


def broken(module: ModuleType, old: str, new: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of a module whose text has one change."""
    assert old in source(module), (module.__name__, old)
    text = source(module).replace(old, new, 1)
    changed: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(text, str(module.__file__), "exec"), changed)
    for name in FUNCTIONS:
        if module is not decoder and name in changed and getattr(changed[name], "__module__", "") == module.__name__:
            patch.setattr(decoder, name, changed[name])
    return changed


def logits(program: Program) -> np.ndarray:
    return np.asarray(computed(program, drawn_params(program, 0), drawn_batch(1))[1])


@pytest.mark.parametrize(("module", "old", "new", "refusal"), BROKEN)
def test_a_broken_layer_is_seen(
    module: ModuleType, old: str, new: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = MODEL_OF.get(module, "llama3")
    table, _, _ = model(name)
    changed = broken(module, old, new, monkeypatch)
    make = (changed["program_of"] if module is decoder else decoder.program_of).__wrapped__
    if refusal:
        with pytest.raises(InputError) as error:
            rows_of(make(table.architecture), PUBLISHED[name])
        assert refusal in str(error.value)
        return
    program = make(table.architecture)
    rows_of(program, PUBLISHED[name])
    assert np.abs(logits(program) - logits(model(name)[1])).max() > 1e-3
