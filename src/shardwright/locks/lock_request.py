"""The request for which a lock was planned: every option by its name on the command line, given or default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from shardwright.core.engines.engines import Engine
from shardwright.core.findings.errors import InputError
from shardwright.core.layout.layout import Auto
from shardwright.core.mesh.hops import AUTO, WAYS
from shardwright.core.model.optimizer import ADAMW
from shardwright.core.policies.policy import BASES, read_policy
from shardwright.core.resolution.request import FLOATS
from shardwright.locks.saved_plan import (
    FLAG,
    NUMBER,
    SIZE,
    TEXT,
    TEXTS,
    WHOLE,
    Fields,
    NotSavedError,
    check_fields,
    maybe,
    needed,
    object_of,
    or_null,
)

WORDS: Mapping[str, tuple[str, ...]] = {
    "engine": get_args(Engine),
    "dtype": FLOATS,
    "weights_dtype": FLOATS,
    "moments_dtype": FLOATS,
}
COUNTS = ("batch", "length", "microbatches")

OPTIONS = ("layout", "mesh", *WORDS, "remat", *COUNTS)
"""Options that may be listed in ``by_default``."""

FORMER: Mapping[str, str] = {"micro_steps": "microbatches"}
"""The names of options in older locks, and their names now."""

REQUEST: Fields = {
    "model": needed(TEXT),
    "set": needed(object_of(TEXT)),
    "layout": needed(TEXT),
    "mesh": needed(object_of(SIZE)),
    "devices": or_null(WHOLE),
    "move": needed(object_of(TEXT)),
    "chips": or_null(TEXT),
    **dict.fromkeys(WORDS, needed(TEXT)),
    "remat": needed(TEXT),
    **dict.fromkeys(COUNTS, needed(WHOLE)),
    "expert_buffer": or_null(NUMBER),
    "load_balance": maybe(FLAG),
    "optimizer": maybe(TEXT),
    "optimizer_set": maybe(object_of(TEXT)),
    "loss_chunks": maybe(WHOLE),
    "average": or_null(NUMBER),
    "tokens": maybe(WHOLE),
    "price": maybe(NUMBER),
    "master_dtype": maybe(TEXT),
    "gradients_dtype": maybe(TEXT),
    "precision": maybe(TEXT),
    "schedule": maybe(TEXT),
    "stages": maybe(TEXT),
    "hops": maybe(TEXT),
    "by_default": needed(TEXTS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRequest:
    """A request as command-line options.

    ``layout``: a preset's name, or the path of a layout file relative to the lock's folder, which has a '/' in it.
    ``precision``: a recipe's name, or the path of its file, in the same way.
    ``by_default``: the options that were not given. They are left open when the lock is checked, so the check reports what
    a changed default moves.
    """

    model: str
    layout: str
    settings: Mapping[str, str] = field(default_factory=dict)
    mesh: Mapping[str, int | Auto] = field(default_factory=dict)
    devices: int | None = None
    move: Mapping[str, str] = field(default_factory=dict)
    chips: str | None = None
    engine: str
    batch: int
    length: int
    dtype: str
    weights_dtype: str
    moments_dtype: str
    remat: str
    microbatches: int
    expert_buffer: float | None = None
    load_balance: bool = False
    optimizer: str = ADAMW.name
    optimizer_settings: Mapping[str, str] = field(default_factory=dict)
    loss_chunks: int = 1
    average: float | None = None
    tokens: int | None = None
    price: float | None = None
    master_dtype: str | None = None
    gradients_dtype: str | None = None
    precision: str | None = None
    schedule: str | None = None
    stages: str | None = None
    hops: str | None = None
    by_default: tuple[str, ...] = ()

    @property
    def is_preset(self) -> bool:
        return "/" not in self.layout

    def to_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "set": dict(self.settings),
            "layout": self.layout,
            "mesh": dict(self.mesh),
            "devices": self.devices,
            "move": dict(self.move),
            "chips": self.chips,
            "engine": self.engine,
            "batch": self.batch,
            "length": self.length,
            "dtype": self.dtype,
            "weights_dtype": self.weights_dtype,
            "moments_dtype": self.moments_dtype,
            "remat": self.remat,
            "microbatches": self.microbatches,
            "expert_buffer": self.expert_buffer,
            "load_balance": self.load_balance,
            **({} if self.optimizer == ADAMW.name else {"optimizer": self.optimizer}),
            **({"optimizer_set": dict(self.optimizer_settings)} if self.optimizer_settings else {}),
            **({} if self.loss_chunks == 1 else {"loss_chunks": self.loss_chunks}),
            **({} if self.average is None else {"average": self.average}),
            **{
                name: value
                for name in (
                    "master_dtype",
                    "gradients_dtype",
                    "precision",
                    "schedule",
                    "stages",
                    "hops",
                    "tokens",
                    "price",
                )
                if (value := getattr(self, name)) is not None
            },
            "by_default": list(self.by_default),
        }

    @classmethod
    def from_json(cls, value: object) -> LockRequest:
        """The request in a JSON value. Raises NotSavedError where there is none."""
        where = "'request'"
        found = check_fields(where, _renamed(value), REQUEST)
        for name in found:
            if name not in REQUEST:
                raise NotSavedError(f"{where} has '{name}', which is no option")
        words = {"master_dtype": FLOATS, "gradients_dtype": FLOATS, "hops": (*WAYS, AUTO)}
        given = {name: known for name, known in words.items() if name in found}
        for name, words in {**WORDS, **given}.items():
            several = found[name].split(",") if name == "moments_dtype" else [found[name]]
            if not set(several) <= set(words):
                raise NotSavedError(f"'{name}' of {where} is '{found[name]}', and must be one of {', '.join(words)}")
        _check_policy(found["remat"], where)
        by_default = found["by_default"]
        for name in by_default:
            if name not in OPTIONS:
                raise NotSavedError(f"'by_default' of {where} has '{name}', which has no default")
        return cls(
            model=found["model"],
            layout=found["layout"],
            settings=found["set"],
            mesh=found["mesh"],
            devices=found.get("devices"),
            move=found["move"],
            chips=found.get("chips"),
            **{name: found[name] for name in (*WORDS, "remat", *COUNTS)},
            expert_buffer=found.get("expert_buffer"),
            load_balance=found.get("load_balance", False),
            optimizer=found.get("optimizer", ADAMW.name),
            optimizer_settings=found.get("optimizer_set", {}),
            loss_chunks=found.get("loss_chunks", 1),
            average=found.get("average"),
            tokens=found.get("tokens"),
            price=found.get("price"),
            master_dtype=found.get("master_dtype"),
            gradients_dtype=found.get("gradients_dtype"),
            precision=found.get("precision"),
            schedule=found.get("schedule"),
            stages=found.get("stages"),
            hops=found.get("hops"),
            by_default=tuple(by_default),
        )


def _check_policy(remat: str, where: str) -> None:
    """Raises NotSavedError for a text that is no policy of recomputation. A file is read when the lock is planned."""
    if "/" in remat:
        return
    try:
        read_policy(remat, "'remat'")
    except InputError as error:
        detail = (
            str(error)
            if set(remat) & set("=@+,")
            else f"'remat' of {where} is '{remat}', and must be one of {', '.join(BASES)}, or a policy"
        )
        raise NotSavedError(detail) from None


def _renamed(value: object) -> object:
    """A request with the present names of its options; any other value unchanged."""
    if not isinstance(value, dict):
        return value
    for former, name in FORMER.items():
        if former in value and name in value:
            raise NotSavedError(f"'request' has '{former}' and '{name}', which are one option")
    renamed = {FORMER.get(name, name): setting for name, setting in value.items()}
    if isinstance(by_default := renamed.get("by_default"), list):
        renamed["by_default"] = [FORMER.get(name, name) if isinstance(name, str) else name for name in by_default]
    return renamed
