"""The optimizers that both engines have by name: their constants, what they keep, and the formula of an update.

A formula is written once, for numbers of either engine. Each update is computed element by element, so no layout changes it.
Then, for every one of them, the weight's new value is ``weight - rate * (update + decay * weight)``, with the decay of
``--weight-decay`` for matrices and 0 for others (decoupled, arXiv:1711.05101).

g the clipped gradient; t the number of steps with this one; all state is 0 before the first step. The page is docs/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.model.optimizer import ADAMW, ADAMW_B1, ADAMW_B2, ADAMW_EPS, FIRST, SECOND, Kept, Optimizer
from shardwright.training.arithmetic import Arithmetic

Values = Mapping[str, Any]
Formula = Callable[[Any, Values, Any, Values, Arithmetic], tuple[Any, Values]]
"""``formula(g, kept, t, constants, arithmetic)``: the update, and what is kept after it, by the same prefixes."""

OPTIMIZER = "optimizer/"
"""Before the name of what an optimizer other than AdamW keeps, in a checkpoint."""

MOMENTUM, SQUARES, LARGEST, CHANGES = (f"{OPTIMIZER}{name}/" for name in ("momentum", "squares", "largest", "changes"))

ENGINES: Mapping[str, Literal["jax", "torch"]] = {"optax": "jax", "torch": "torch"}
"""Before the colon of an optimizer that only one engine has: the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """``kind``: a share is at least 0 and below 1; a positive number is above 0; a flag is true or false."""

    default: float | bool
    kind: Literal["share", "positive", "flag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``kept``: prefixes, with the constant without which it is not kept, or None. ``source``: of the formula."""

    constants: Mapping[str, Constant]
    kept: Mapping[str, str | None]
    formula: Formula
    source: str


def _adamw(g: Any, kept: Values, t: Any, c: Values, of: Arithmetic) -> tuple[Any, Values]:
    first = of.weighted(kept[FIRST], c["b1"], g, 1 - c["b1"])
    second = of.weighted(kept[SECOND], c["b2"], g * g, 1 - c["b2"])
    update, root = first / (1 - c["b1"] ** t), of.root(second / (1 - c["b2"] ** t))
    # In place, where arrays can be changed: no one else has these two.
    root += c["eps"]
    update /= root
    return update, {FIRST: first, SECOND: second}


def _sgd(g: Any, kept: Values, t: Any, c: Values, of: Arithmetic) -> tuple[Any, Values]:
    del t, of
    if not kept:
        return g, {}
    momentum = kept[MOMENTUM] * c["momentum"] + g
    return (momentum * c["momentum"] + g if c["nesterov"] else momentum), {MOMENTUM: momentum}


def _lion(g: Any, kept: Values, t: Any, c: Values, of: Arithmetic) -> tuple[Any, Values]:
    del t
    before = kept[MOMENTUM]
    update = of.sign(before * c["b1"] + g * (1 - c["b1"]))
    return update, {MOMENTUM: before * c["b2"] + g * (1 - c["b2"])}


def _adagrad(g: Any, kept: Values, t: Any, c: Values, of: Arithmetic) -> tuple[Any, Values]:
    del t
    squares = kept[SQUARES] + g * g
    return g / (of.root(squares) + c["eps"]), {SQUARES: squares}


def _rmsprop(g: Any, kept: Values, t: Any, c: Values, of: Arithmetic) -> tuple[Any, Values]:
    del t
    squares = kept[SQUARES] * c["decay"] + g * g * (1 - c["decay"])
    return g / (of.root(squares) + c["eps"]), {SQUARES: squares}


def _adamax(g: Any, kept: Values, t: Any, c: Values, of: Arithmetic) -> tuple[Any, Values]:
    momentum = kept[MOMENTUM] * c["b1"] + g * (1 - c["b1"])
    largest = of.most(kept[LARGEST] * c["b2"], abs(g) + c["eps"])
    return momentum / (1 - c["b1"] ** t) / largest, {MOMENTUM: momentum, LARGEST: largest}


def _adadelta(g: Any, kept: Values, t: Any, c: Values, of: Arithmetic) -> tuple[Any, Values]:
    del t
    squares = kept[SQUARES] * c["rho"] + g * g * (1 - c["rho"])
    update = of.root(kept[CHANGES] + c["eps"]) / of.root(squares + c["eps"]) * g
    return update, {SQUARES: squares, CHANGES: kept[CHANGES] * c["rho"] + update * update * (1 - c["rho"])}


def _share(default: float) -> Constant:
    return Constant(default=default, kind="share")


def _positive(default: float) -> Constant:
    return Constant(default=default, kind="positive")


OPTIMIZERS: Mapping[str, Row] = {
    "adamw": Row(
        constants={"b1": _share(ADAMW_B1), "b2": _share(ADAMW_B2), "eps": _positive(ADAMW_EPS)},
        kept={FIRST: None, SECOND: None},
        formula=_adamw,
        source="arXiv:1711.05101",
    ),
    "sgd": Row(
        constants={"momentum": _share(0.9), "nesterov": Constant(default=False, kind="flag")},
        kept={MOMENTUM: "momentum"},
        formula=_sgd,
        source="Sutskever et al., ICML 2013",
    ),
    "lion": Row(
        constants={"b1": _share(0.9), "b2": _share(0.99)},
        kept={MOMENTUM: None},
        formula=_lion,
        source="arXiv:2302.06675",
    ),
    "adagrad": Row(
        constants={"eps": _positive(1e-10)},
        kept={SQUARES: None},
        formula=_adagrad,
        source="Duchi et al., JMLR 12, 2011",
    ),
    "rmsprop": Row(
        constants={"decay": _share(0.99), "eps": _positive(1e-8)},
        kept={SQUARES: None},
        formula=_rmsprop,
        source="Tieleman and Hinton, lecture 6.5, 2012",
    ),
    "adamax": Row(
        constants={"b1": _share(0.9), "b2": _share(0.999), "eps": _positive(1e-8)},
        kept={MOMENTUM: None, LARGEST: None},
        formula=_adamax,
        source="arXiv:1412.6980, section 7.1",
    ),
    "adadelta": Row(
        constants={"rho": _share(0.9), "eps": _positive(1e-6)},
        kept={SQUARES: None, CHANGES: None},
        formula=_adadelta,
        source="arXiv:1212.5701",
    ),
}
"""Names are those that optax and ``torch.optim`` share, where both mean one formula. NAdam, RAdam and Adam with amsgrad are
other formulas in each: they go by ``optax:`` and ``torch:``."""


NOT_HERE: Mapping[str, str] = {
    "muon": "it multiplies the entire matrix of a weight with itself: optax takes it for weights of two dims, so for embedding and logits too, and "
    "Adam for those of attention, which have three, torch.optim takes no weight of another number of dims",
    "adafactor": "what it keeps has the shape of a row and of a column of a weight, and state is sharded, saved and resharded as its weight is",
}
"""Optimizers that libraries have, and under which a layout would change numbers, or has no boxes for the state."""


def check_here(name: str) -> None:
    """Raises InputError for an optimizer of ``NOT_HERE``, of a library or not: ``contrib.muon``."""
    why = NOT_HERE.get(name.lower().removeprefix("contrib."))
    if why is not None:
        known = ", ".join(sorted(OPTIMIZERS))
        raise InputError(f"--optimizer: '{name}' is not run: {why}. Give one that both engines have: {known}.")


def is_own(optimizer: Optimizer) -> bool:
    """Whether it is an engine's own, as ``optax:lamb``."""
    return ":" in optimizer.name


def optimizer_of(name: str, settings: Mapping[str, str]) -> Optimizer:
    """An optimizer of the table, with its constants; those in ``settings`` as typed. Raises InputError for what it has not.

    >>> optimizer_of("sgd", {"momentum": "0.5"}).text
    'sgd momentum=0.5 nesterov=false'
    """
    check_here(name)
    row = OPTIMIZERS.get(name)
    if row is None:
        raise InputError(
            f"--optimizer: there is no optimizer '{name}'. {did_you_mean(name, OPTIMIZERS)} An engine's own is "
            f"optax:NAME or torch:NAME."
        )
    for key in settings:
        if key not in row.constants:
            raise InputError(f"--optimizer-set: '{name}' has no constant '{key}'. {did_you_mean(key, row.constants)}")
    constants = {
        key: _read(key, constant, settings[key]) if key in settings else constant.default
        for key, constant in row.constants.items()
    }
    if name == "sgd" and constants["nesterov"] and not constants["momentum"]:
        raise InputError(
            "--optimizer-set: nesterov is true, and momentum is 0. Give a momentum above 0, as momentum=0.9."
        )
    if name == ADAMW.name and constants == ADAMW.constants:
        return ADAMW
    kept = tuple(Kept(prefix=prefix) for prefix, needs in row.kept.items() if needs is None or constants[needs])
    return Optimizer(name=name, constants=constants, kept=kept)


def _read(key: str, constant: Constant, text: str) -> float | bool:
    value = value_of(text)
    needed, fits = {
        "flag": ("true or false", isinstance(value, bool)),
        "share": ("a number of at least 0 and below 1", _is_number(value) and 0 <= float(value) < 1),
        "positive": ("a finite number above 0", _is_number(value) and float(value) > 0 and isfinite(float(value))),
    }[constant.kind]
    if not fits:
        raise InputError(f"--optimizer-set: {key} is '{text}', and must be {needed}, as {_default(constant)}.")
    return value if isinstance(value, bool) else float(value)


def value_of(text: str) -> float | bool | str:
    """A flag, a number, or else the text itself.

    >>> value_of("true"), value_of("1e-3"), value_of("x")
    (True, 0.001, 'x')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text


def _is_number(value: float | bool | str) -> bool:
    return isinstance(value, float)


def _default(constant: Constant) -> str:
    return str(constant.default).lower()
