"""The answer of a plan with chips: whether it fits, how fast a step is, and how long and how dear the training would be."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_OF_A_DAY = 86_400.0
SECONDS_OF_AN_HOUR = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The collectives that a step waits for the longest: their ``kind``, mesh ``axes`` and ``component``, and the network that they cross,
    as ``between nodes``. ``seconds``: of all in a step, hidden or not."""

    kind: str
    axes: tuple[str, ...]
    component: str
    network: str
    seconds: float

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "component": self.component,
            "network": self.network,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of a step by the plan. ``low_seconds``, ``high_seconds``: between them are nine of ten such steps.

    Model FLOPs: those of forward and backward pass without what is recomputed (PaLM, arXiv:2204.02311, appendix B). Hardware FLOPs: with
    it, as kernels count them. Both in TFLOP/s of one device. ``mfu``: the share of model FLOPs in the chip's peak of dense bfloat16
    products; None where the chip has no figure.
    """

    seconds: float
    low_seconds: float | None
    high_seconds: float | None
    tokens_per_s: float
    tokens_per_s_per_device: float
    model_tflops_per_s_per_device: float
    hardware_tflops_per_s_per_device: float | None
    mfu: float | None
    exposed_share: float
    waiting: Waiting | None

    def to_json(self) -> dict[str, object]:
        return {
            "step_s": self.seconds,
            "low_step_s": self.low_seconds,
            "high_step_s": self.high_seconds,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "model_tflops_per_s_per_device": self.model_tflops_per_s_per_device,
            "hardware_tflops_per_s_per_device": self.hardware_tflops_per_s_per_device,
            "mfu": self.mfu,
            "exposed_share": self.exposed_share,
            "waiting": None if self.waiting is None else self.waiting.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How long steps of a speed take for ``tokens``. ``price``: of a device for an hour, in any currency; ``cost``: in the same."""

    tokens: int
    days: float
    device_hours: float
    price: float | None

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.price * self.device_hours

    def to_json(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "days": self.days,
            "device_hours": self.device_hours,
            **({} if self.price is None else {"price": self.price, "cost": self.cost}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``needed_bytes`` of the ``usable_bytes`` of a device's memory; None where the devices have no limit. ``needed_bytes_if_one_device_gets_all``: of a
    device that gets all tokens that its experts may, whose buffers have grown for them; None where they do not grow. ``speed`` None: a
    step has no time, because a link or a kernel has no figure or devices have no row. ``training``: None without a number of tokens."""

    needed_bytes: int
    usable_bytes: int | None
    needed_bytes_if_one_device_gets_all: int | None = None
    speed: Speed | None = None
    training: Training | None = None

    @property
    def fits(self) -> bool | None:
        return None if self.usable_bytes is None else self.needed_bytes <= self.usable_bytes

    def to_json(self) -> dict[str, object]:
        return {
            "fits": self.fits,
            "needed_bytes": self.needed_bytes,
            "usable_bytes": self.usable_bytes,
            **(
                {"needed_bytes_if_one_device_gets_all": most}
                if (most := self.needed_bytes_if_one_device_gets_all) is not None
                else {}
            ),
            **({} if self.speed is None else self.speed.to_json()),
            **({} if self.training is None else {"training": self.training.to_json()}),
        }


def training_of(tokens: int, price: float | None, speed: Speed, devices: int) -> Training:
    """The training of so many tokens at a speed on so many devices.

    >>> speed = Speed(
    ...     seconds=1.0, low_seconds=None, high_seconds=None, tokens_per_s=1e6, tokens_per_s_per_device=1e4,
    ...     model_tflops_per_s_per_device=400.0, hardware_tflops_per_s_per_device=None, mfu=None, exposed_share=0.0, waiting=None
    ... )
    >>> training = training_of(86_400_000_000, 2.0, speed, 100)
    >>> training.days, training.device_hours, training.cost
    (1.0, 2400.0, 4800.0)
    """
    seconds = tokens / speed.tokens_per_s
    return Training(
        tokens=tokens,
        days=seconds / SECONDS_OF_A_DAY,
        device_hours=seconds * devices / SECONDS_OF_AN_HOUR,
        price=price,
    )
