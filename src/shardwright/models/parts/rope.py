"""Rotary position embeddings as numbers: inverse frequencies and the factors of a context-length scaling.

Both engines read them from here, so that a frequency is rounded only once, to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Literal

from shardwright.core.findings.errors import InputError
from shardwright.models.parts.size import require_above, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embeddings with base ``theta``, scaled by ``factor`` from a context of ``original_length`` tokens.

    ``llama3`` reads ``low_freq_factor`` and ``high_freq_factor`` (Llama 3.1 reference code, 2024); ``yarn`` reads
    ``beta_fast``, ``beta_slow``, ``mscale`` and ``mscale_all_dim`` (YaRN, arXiv:2309.00071, as DeepSeek configures it).
    ``interleaved``: pairs are neighbours (0, 1), (2, 3), ...; else they are the two halves of a head.
    """

    kind: Literal["default", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise InputError(f"rope.theta is {self.theta}, and must be above 1.")
        require_positive(**{f"rope.{name}": getattr(self, name) for name in ("factor", "original_length")})
        require_positive(**{f"rope.{name}": getattr(self, name) for name in ("beta_fast", "beta_slow")})
        require_above(**{"rope.high_freq_factor": self.high_freq_factor, "rope.low_freq_factor": self.low_freq_factor})

    def inverse_frequencies(self, dim: int) -> tuple[float, ...]:
        """Radians per token of each of the ``dim / 2`` pairs.

        >>> Rope(theta=100.0).inverse_frequencies(4)
        (1.0, 0.1)
        """
        plain = tuple(self.theta ** (-2 * pair / dim) for pair in range(dim // 2))
        if self.kind == "llama3":
            return tuple(self._llama3(frequency) for frequency in plain)
        if self.kind == "yarn":
            low, high = self._yarn_range(dim)
            return tuple(
                _blend(frequency / self.factor, frequency, min(1.0, max(0.0, (pair - low) / (high - low))))
                for pair, frequency in enumerate(plain)
            )
        return plain

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines; 1 except for YaRN."""
        if self.kind != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """Factor of 1 / sqrt(head_dim) in MLA: the square of YaRN's ``mscale_all_dim`` term."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return _yarn_mscale(self.factor, self.mscale_all_dim) ** 2

    def _llama3(self, frequency: float) -> float:
        rotations = self.original_length * frequency / (2 * pi)
        weight = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(frequency, frequency / self.factor, min(1.0, max(0.0, weight)))

    def _yarn_range(self, dim: int) -> tuple[float, float]:
        """The pairs between which YaRN blends from plain to scaled frequencies."""

        def pair_with(rotations: float) -> float:
            return dim * log(self.original_length / (rotations * 2 * pi)) / (2 * log(self.theta))

        low, high = max(floor(pair_with(self.beta_fast)), 0), min(ceil(pair_with(self.beta_slow)), dim - 1)
        return low, high if high != low else high + 0.001


def _blend(at_one: float, at_zero: float, weight: float) -> float:
    return at_one * weight + at_zero * (1 - weight)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0
