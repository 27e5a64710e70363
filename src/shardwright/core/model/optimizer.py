"""What an optimizer keeps between two steps, as far as a plan and a checkpoint must know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = float | bool | None | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One tensor for each trained weight, of its shape and sharded as it is.

    ``prefix``: before the weight's name, in a checkpoint. ``dtype`` None: that of the moments. ``weights`` None: every
    trained weight has one.
    """

    prefix: str
    dtype: str | None = None
    weights: frozenset[str] | None = None

    def has(self, weight: str) -> bool:
        """Whether this weight has one."""
        return self.weights is None or weight in self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer by name, with its constants.

    ``kept``: its tensors of the weights' shapes. ``shared``: its other state, as a count of steps, which every device has: shape
    and dtype by the name in a checkpoint.
    """

    name: str
    constants: Mapping[str, Value] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()
    shared: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The name and the constants in one line.

        >>> Optimizer(name="sgd", constants={"momentum": 0.9, "nesterov": False}).text
        'sgd momentum=0.9 nesterov=false'
        """
        return " ".join([self.name, *(f"{name}={constant_text(value)}" for name, value in self.constants.items())])


def constant_text(value: Value) -> str:
    """A constant as it is typed.

    >>> constant_text(True), constant_text(1e-8), constant_text((0.9, 0.99))
    ('true', '1e-08', '0.9/0.99')
    """
    if isinstance(value, tuple):
        return "/".join(map(repr, value))
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


FIRST, SECOND = "moments.first/", "moments.second/"
"""The prefixes of a weight's name that name AdamW's two moments in a checkpoint."""

AVERAGE = Kept(prefix="average/", dtype="float32")
"""The exponential average of a weight. In bfloat16 it would stand still: a step changes it by less than half a last bit."""

MASTER = Kept(prefix="master/")
"""A weight in a wider dtype than that in which it is at rest. A step updates it, and the weight is its rounding."""

ADAMW_B1, ADAMW_B2, ADAMW_EPS = 0.9, 0.95, 1e-8
"""AdamW's constants, as Llama and DeepSeek-V3 publish them (arXiv:2302.13971, section 2.3; arXiv:2412.19437, section 4.2)."""

ADAMW = Optimizer(
    name="adamw",
    constants={"b1": ADAMW_B1, "b2": ADAMW_B2, "eps": ADAMW_EPS},
    kept=(Kept(prefix=FIRST), Kept(prefix=SECOND)),
)
"""The optimizer of a request that names none."""
