"""Reads a recipe from the values of a file. An error has its place, and the nearest known name.

```yaml
recipe: fp8-delayed        # a preset, or a name of your own
amax_history_len: 16       # its options
high: ["*.0.attention.*"]  # weights whose products stay in the computation's dtype
operands:                  # a quantizer, or null, for some operands; for all of them under a name of your own
  weight_gradient:
    input: null
```
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from shardwright.core.findings.bounds import is_integer
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.findings.position import Located, Position
from shardwright.core.recipes.formats import E4M3, E8M0, FORMATS
from shardwright.core.recipes.hadamard import SIZES
from shardwright.core.recipes.presets import PRESETS, options_of, preset
from shardwright.core.recipes.recipe import (
    OPERANDS,
    PER_ROW,
    PER_TENSOR,
    Block,
    History,
    Operand,
    Product,
    Quantizer,
    Recipe,
    Scale,
    one_transformed,
)

PATTERNS = ("high", "quantized")
SETTINGS: Mapping[str, int | bool] = {
    "high_layers": 0,
    "reduce_amax": True,
    "gather_quantized": False,
    "rest_quantized": False,
    "dispatch_quantized": False,
    "counter_based": True,
}
"""What every recipe may say, with its default."""

HISTORY: Mapping[str, tuple[int | str, tuple[str, ...]]] = {
    name: (field.default, get_args(get_type_hints(History)[name]))
    for name, field in History.__dataclass_fields__.items()
}
WORDS: Mapping[str, tuple[str, ...]] = {
    "dtype": tuple(FORMATS),
    "scale": get_args(get_type_hints(Scale)["rule"]),
    "scale_dtype": ("float32", *FORMATS),
    "amax": get_args(get_type_hints(Quantizer)["amax"]),
    "rounding": get_args(get_type_hints(Quantizer)["rounding"]),
}
QUANTIZER = ("dtype", "block", "scale", "scale_dtype", "of_tensor", "amax", "rounding", "hadamard")
NAMED_BLOCKS = {"per tensor": PER_TENSOR, "per row": PER_ROW}
LARGEST_BLOCK = 1 << 20
LARGEST_HISTORY = 1 << 20


def read_recipe(source: Located) -> Recipe:
    """The recipe that a file declares. Raises InputError, with the place, for what is none."""
    top = _mapping(source, "a recipe", None)
    if "recipe" not in top:
        raise _error(
            source.position, f"there is no 'recipe'. Write one of {', '.join(PRESETS)}, or a name of your own."
        )
    name = _text(top["recipe"], "'recipe'")
    known = name in PRESETS
    options = options_of(name) if known else HISTORY
    allowed = tuple(dict.fromkeys(("recipe", *options, *SETTINGS, *PATTERNS, "operands")))
    if not known and "operands" not in top:
        message = f"'{name}' is no recipe, and has no 'operands' of its own. {did_you_mean(name, PRESETS)}"
        raise _error(top["recipe"].position, message)
    for key in top:
        if key not in allowed:
            raise _error(source.key_position(key), f"'{key}' is no option of '{name}'. {did_you_mean(key, allowed)}")
    given = {key: _value(top[key], key, *options[key]) for key in top if key in options}
    operands = _operands(top["operands"]) if "operands" in top else {}
    made = preset(name, **given) if known else _own(name, operands, given, source, top["operands"].position)
    settings = {key: _value(top[key], key, SETTINGS[key], ()) for key in top if key in SETTINGS and key not in options}
    if not made.quantizers:
        raise _error(top["operands"].position, f"the 'operands' of '{name}' quantize nothing.")
    patterns = {key: _patterns(top[key], key) for key in PATTERNS if key in top}
    if not known:
        return replace(made, **settings, **patterns)
    quantizers = {at: each for at, each in {**made.quantizers, **operands}.items() if each is not None}
    _check_delayed(quantizers, made.history, top.get("operands", source).position)
    _check_transforms(quantizers, top.get("operands", source).position)
    return replace(made, quantizers=_in_order(quantizers), **settings, **patterns)


Place = tuple[Product, Operand]


def _own(
    name: str, operands: Mapping[Place, Quantizer | None], given: Mapping[str, Any], source: Located, where: Position
) -> Recipe:
    quantizers = _in_order({at: each for at, each in operands.items() if each is not None})
    _check_transforms(quantizers, where)
    delayed = any(each.amax == "delayed" for each in quantizers.values())
    if given and not delayed:
        option = next(iter(given))
        raise _error(source.key_position(option), f"'{option}' is of delayed amaxes, and no operand has one.")
    return Recipe(name=name, quantizers=quantizers, history=History(**given) if delayed else None, source="a file")


def _check_delayed(quantizers: Mapping[Place, Quantizer], history: History | None, where: Position) -> None:
    delayed = any(each.amax == "delayed" for each in quantizers.values())
    if delayed and history is None:
        raise _error(
            where, "an operand has a delayed amax, and the recipe no history. Begin with 'recipe: fp8-delayed'."
        )
    if history is not None and not delayed:
        raise _error(where, "no operand has a delayed amax, and the recipe a history. Begin with another recipe.")


def _check_transforms(quantizers: Mapping[Place, Quantizer], where: Position) -> None:
    for product in one_transformed(quantizers):
        each = [quantizers.get((product, operand)) for operand in OPERANDS[product]]
        first, second = ("none" if one is None else one.hadamard or "none" for one in each)
        raise _error(
            where,
            f"'hadamard' of the operands of '{product}' is {first} and {second}. Give both the same: otherwise they have "
            f"another product.",
        )


def _in_order(quantizers: Mapping[Place, Quantizer]) -> dict[Place, Quantizer]:
    places: list[Place] = [(product, operand) for product, operands in OPERANDS.items() for operand in operands]
    return {at: quantizers[at] for at in places if at in quantizers}


def _operands(node: Located) -> dict[Place, Quantizer | None]:
    found: dict[Place, Quantizer | None] = {}
    given = _mapping(node, "'operands'", tuple(OPERANDS))
    for product, operands in OPERANDS.items():
        of_product = _mapping(given[product], f"'{product}'", operands) if product in given else {}
        for operand in operands:
            if operand in of_product:
                value = of_product[operand]
                here = f"'{operand}' of '{product}'"
                found[product, operand] = None if value.value is None else _quantizer(value, here)
    return found


def _quantizer(node: Located, where: str) -> Quantizer:
    fields = _mapping(node, where, QUANTIZER)
    for key in ("dtype", "block"):
        if key not in fields:
            raise _error(node.position, f"{where} has no '{key}'.")
    words: dict[str, Any] = {key: _word(fields[key], key, WORDS[key]) for key in fields if key in WORDS}
    scale = Scale(
        rule=words.get("scale", "exact"),
        dtype=words.get("scale_dtype", "float32"),
        of_tensor=bool(_value(fields["of_tensor"], "of_tensor", False, ())) if "of_tensor" in fields else False,
    )
    _check_scale(scale, node.position, where)
    hadamard = fields["hadamard"] if "hadamard" in fields and fields["hadamard"].value is not None else None
    return Quantizer(
        dtype=words["dtype"],
        block=_block(fields["block"]),
        scale=scale,
        amax=words.get("amax", "current"),
        rounding=words.get("rounding", "nearest"),
        hadamard=None if hadamard is None else _size(hadamard),
    )


def _check_scale(scale: Scale, position: Position, where: str) -> None:
    """Scales that a format cannot hold, and a second scale beside others than it is computed with."""
    if scale.of_tensor and (scale.rule, scale.dtype) != ("exact", E4M3):
        raise _error(
            position,
            f"{where} has 'of_tensor', beside which scales of blocks are exact and {E4M3}. Give 'scale_dtype: {E4M3}' and no "
            f"'scale'; its are '{scale.rule}' and {scale.dtype}.",
        )
    if scale.rule == "exact" and scale.dtype == E8M0:
        raise _error(
            position,
            f"{where} has scales of {E8M0}, which are powers of two, by the rule 'exact'. Give 'scale: power of two up', or another "
            f"'scale_dtype'.",
        )


def _block(node: Located) -> Block:
    text = _text(node, "'block'")
    if text in NAMED_BLOCKS:
        return NAMED_BLOCKS[text]
    found = re.fullmatch(r"([0-9]{1,7}) *x *([0-9]{1,7})", text)
    if found is None or not all(1 <= int(size) <= LARGEST_BLOCK for size in found.groups()):
        raise _error(
            node.position,
            f"'{text}' is no block. Write 'per tensor', 'per row', or its size along the other and the contracted dim, as in "
            f"'1 x 128'; at most {LARGEST_BLOCK:,}.",
        )
    return Block(other=int(found[1]), contracted=int(found[2]))


def _size(node: Located) -> int:
    if node.value not in SIZES or isinstance(node.value, bool):
        raise _error(
            node.position,
            f"'hadamard' is {_shown(node)}, and must be {', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]}.",
        )
    return int(node.value)


def _value(node: Located, name: str, default: int | bool | str, words: tuple[str, ...]) -> int | bool | str:
    """The value of an option, of the type of its default."""
    value = node.value
    if words:
        return _word(node, name, words)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise _error(node.position, f"'{name}' is {_shown(node)}, and must be true or false.")
        return value
    least = 1 if name in ("amax_history_len", "interval") else 0
    if not is_integer(value) or not least <= value <= LARGEST_HISTORY:
        raise _error(
            node.position,
            f"'{name}' is {_shown(node)}, and must be a whole number from {least} to {LARGEST_HISTORY:,}.",
        )
    return value


def _word(node: Located, name: str, words: tuple[str, ...]) -> str:
    value = node.value
    if not isinstance(value, str) or value not in words:
        hint = did_you_mean(value, words) if isinstance(value, str) else f"Known: {', '.join(words)}."
        raise _error(node.position, f"'{name}' is {_shown(node)}. {hint}")
    return value


def _patterns(node: Located, name: str) -> tuple[str, ...]:
    values = node.value
    if not isinstance(values, tuple) or not all(isinstance(one.value, str) for one in values):
        raise _error(node.position, f"'{name}' is {_shown(node)}, and must be a list of patterns, as in ['*.down'].")
    return tuple(str(one.value) for one in values)


def _text(node: Located, name: str) -> str:
    if not isinstance(node.value, str):
        raise _error(node.position, f"{name} is {_shown(node)}, and must be a text.")
    return node.value


def _mapping(node: Located, name: str, known: tuple[str, ...] | None) -> Mapping[str, Located]:
    if not isinstance(node.value, Mapping):
        raise _error(node.position, f"{name} is {_shown(node)}, and must be a mapping.")
    for key in node.value if known is not None else ():
        if known is not None and key not in known:
            raise _error(node.key_position(key), f"{name} has '{key}'. {did_you_mean(key, known)}")
    return node.value


def _shown(node: Located) -> str:
    """A value for a message."""
    if isinstance(node.value, Mapping):
        return "a mapping"
    return "a list" if isinstance(node.value, tuple) else repr(node.value)


def _error(position: Position, message: str) -> InputError:
    return InputError(f"{position}: {message}")
