"""What a published configuration has besides what our tables compute: findings that every verb shows."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.finding import Finding
from shardwright.core.layout.faults import shown
from shardwright.core.model.training_only import TrainingOnly
from shardwright.interop.hugging_face.keys import PublishedType
from shardwright.interop.hugging_face.published import Published
from shardwright.interop.hugging_face.rope import rope_key, unread_of_rope

QUANTIZED = "quantization_config"


def training_only(published: Published, kind: PublishedType) -> Iterator[TrainingOnly]:
    """What changes only training. ``published``: with each key under one name."""
    for key, training in kind.training.items():
        value = published.values.get(key, training.default)
        if value not in training.neutral:
            source = "" if key in published.values else f" by default of transformers' {kind.of_class}"
            yield TrainingOnly(
                key=key, value=f"{shown(value)}{source}", part=training.part, position=published.place(key)
            )


def besides(published: Published, kind: PublishedType) -> Iterator[Finding]:
    """What is not read. ``published``: with each key under one name."""
    for key in published.values:
        if key not in kind.read:
            yield _unread(published, key, f"no key of transformers' {kind.of_class or 'class'}")
    for key in unread_of_rope(published):
        yield _unread(published, key, f"'{rope_key(published)}' of its type has no such number")
    if published.values.get(QUANTIZED):
        yield Finding(
            code="SW123",
            severity="info",
            where=f"'{QUANTIZED}'",
            position=published.place(QUANTIZED),
            found="quantised weights, which the table takes in a floating-point dtype",
            needed="nothing: it changes no weight of the table",
        )
    if by_default := left_out(published, kind):
        yield Finding(
            code="SW123",
            severity="info",
            where=", ".join(f"'{key}'" for key in by_default),
            found=defaults_text(published, kind),
            needed="nothing, if these are the model's",
        )


def defaults_text(published: Published, kind: PublishedType) -> str:
    """What a file leaves out, with the numbers that are taken; empty where it has all."""
    numbers = ", ".join(f"{key} {shown(value)}" for key, value in left_out(published, kind).items())
    return f"left out of the file, and as in transformers' {kind.of_class}: {numbers}" if numbers else ""


def left_out(published: Published, kind: PublishedType) -> dict[str, object]:
    """The dimensions and factors that the file leaves out, and that something in it does not give."""
    read = (*published.values, "initializer_range", "max_position_embeddings")
    return {
        key: value
        for key, value in kind.defaults.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in read
    }


def _unread(published: Published, key: str, found: str) -> Finding:
    return Finding(
        code="SW111",
        severity="warning",
        where=f"'{key}'",
        position=published.place(key),
        found=f"{found}: it is not read",
        needed="a key that is computed, or none",
    )
