"""Text of numbers and lists in findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.core.layout.roles import UNIT_NAMES
from shardwright.core.mesh.mesh import Mesh

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(number: float, like: float | None = None) -> str:
    """Bytes in the largest binary unit in which they are at least 1, or in the unit of ``like``, to compare the two.

    >>> bytes_text(1 << 30), bytes_text(1 << 20, like=1 << 30), bytes_text(600)
    ('1.00 GiB', '0.000977 GiB', '600 B')
    """
    power = 0
    while (number if like is None else like) >= 1024 ** (power + 1) and power < len(BYTE_UNITS) - 1:
        power += 1
    value = number / 1024**power
    return f"{_three_digits(value) if power else round(value)} {BYTE_UNITS[power]}"


def percent(share: float) -> str:
    """A fraction as a percentage, three digits below 100%.

    >>> percent(0.04183), percent(1)
    ('4.18%', '100%')
    """
    return f"{100 * share:.0f}%" if share >= 1 else f"{100 * share:.3g}%"


def product(mesh: Mesh, axes: Iterable[str]) -> str:
    """The axes larger than 1 with their sizes, and the product if there are several.

    >>> product(Mesh.of(data=1, fsdp=256, expert=8), ["data", "fsdp", "expert"])
    'fsdp 256 x expert 8 = 2048'
    """
    large = mesh.larger_than_one(axes)
    if not large:
        return "1 device"
    text = " x ".join(f"{axis} {mesh.size(axis)}" for axis in large)
    return text if len(large) == 1 else f"{text} = {mesh.size(large)}"


def either(items: Iterable[object]) -> str:
    """A list joined by "or".

    >>> either([1, 2, 4])
    '1, 2 or 4'
    """
    return _listed(items, "or")


def every(items: Iterable[object]) -> str:
    """A list joined by "and".

    >>> every(["input", "router"])
    'input and router'
    """
    return _listed(items, "and")


def count(number: float, noun: str) -> str:
    """A number with its noun, singular or plural.

    >>> count(1, "row"), count(12, "row"), count(8, "vocabulary entry")
    ('1 row', '12 rows', '8 vocabulary entries')
    """
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of a noun.

    >>> plural("row"), plural("vocabulary entry"), plural("microbatch")
    ('rows', 'vocabulary entries', 'microbatches')
    """
    if noun.endswith("y"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("ch", "x")) else f"{noun}s"


def with_article(initials: str) -> str:
    """A name that is read letter by letter, with its article.

    >>> with_article("H100 SXM"), with_article("TPU v5p"), with_article("MI300X")
    ('an H100 SXM', 'a TPU v5p', 'an MI300X')
    """
    return f"{'an' if initials[:1] in tuple('AEFHILMNORSX') else 'a'} {initials}"


def counted(size: int, logical_axis: str) -> str:
    """A size along a logical axis: ``8 KV heads``, or ``q_lora 1536`` where it counts elements.

    >>> counted(8, "kv_heads"), counted(1536, "q_lora")
    ('8 KV heads', 'q_lora 1536')
    """
    return count(size, UNIT_NAMES[logical_axis]) if logical_axis in UNIT_NAMES else f"{logical_axis} {size}"


def others(names: Sequence[str], noun: str) -> str:
    """The first of some names, and how many more there are.

    >>> others(["q", "k", "v"], "weight"), others(["q"], "weight")
    ('q and 2 more weights', 'q')
    """
    more = len(names) - 1
    return f"{names[0]} and {more} more {noun if more == 1 else noun + 's'}" if more else names[0]


def _listed(items: Iterable[object], word: str) -> str:
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {word} {texts[-1]}"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
