"""What a module keeps for delayed amaxes between steps, as buffers; and the step from amaxes to factors.

| buffer | |
|---|---|
| ``weight_input_factor`` | of an operand of a weight, what its elements are multiplied by, float32; ``scale`` in Transformer Engine |
| ``weight_input_history`` | its amaxes in the last steps, ``[amax_history_len]``, float32 |
| ``steps`` | the number of steps done |
| ``sources`` | how many groups of ranks had tokens of their own in the last step, int32; 0 before the first |
| ``recipe`` | the text of the recipe, in UTF-8 |

All are the same on all ranks that hold parts of the tensor, so that any program saves one of them, and loads it on any mesh. The
amaxes of a step that has not ended are in no state.

A mean over fewer tokens has larger cotangents. So the step after a load multiplies by factors of its own amaxes where the state is of another
number of sources, and where weights were loaded without a state (``measures``); the step after that has factors of both.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.delayed import FIRST_FACTOR
from shardwright.core.recipes.formula import amax_of
from shardwright.core.recipes.recipe import DIMS, History, Operand, Quantizer, Recipe
from shardwright.engine_torch.io.layer_io import Site
from shardwright.engine_torch.own_program.recipes import RECIPE_BYTES, other_recipe, shown, text_of
from shardwright.engine_torch.precision.arrays import ARRAYS
from shardwright.engine_torch.precision.delayed import Kept

OTHER = -1
"""In place of a number of sources: of other weights."""


class DelayedAmaxes(nn.Module):
    """The buffers of a module whose recipe has delayed amaxes. ``weights``: the names of the weights that it quantizes."""

    recipe: torch.Tensor
    sources: torch.Tensor
    steps: torch.Tensor

    def __init__(self, recipe: Recipe, weights: Iterable[str], label: str, device: torch.device) -> None:
        super().__init__()
        assert recipe.history is not None, recipe.name
        self.rule: History = recipe.history
        self.label, self.text = label, text_of(recipe)
        self.quantizers: Mapping[tuple[str, Operand], Quantizer] = {
            (weight, operand): next(
                one for (_, of), one in recipe.quantizers.items() if of == operand and one.amax == "delayed"
            )
            for weight in weights
            for operand in DIMS
            if any(of == operand and one.amax == "delayed" for (_, of), one in recipe.quantizers.items())
        }
        for weight, operand in self.quantizers:
            for what, shape, dtype in (
                ("factor", (), torch.float32),
                ("history", (self.rule.amax_history_len,), torch.float32),
                ("amax", (), torch.int32),
            ):
                tensor = torch.zeros(shape, dtype=dtype, device=device)
                self.register_buffer(f"{weight}_{operand}_{what}", tensor, persistent=what != "amax")
        # Since the last end of a step: passes with each weight. Until the first end they are looked at for a step that has none.
        self._passes: Counter[str] = Counter()
        self._ends = False
        # The sources of a state that was loaded since: 0 where it had no step, OTHER where weights were loaded without one.
        self._loaded: int | None = None
        self._version = 0
        self.register_buffer("sources", torch.zeros((), dtype=torch.int32, device=device))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int32, device=device))
        self.register_buffer("recipe", torch.zeros(RECIPE_BYTES, dtype=torch.uint8, device=device))
        self.reset()

    def reset(self) -> None:
        """The state before the first step."""
        for one in self.buffers():
            one.zero_()
        for weight, operand in self.quantizers:
            self.kept(weight, operand).factor.fill_(FIRST_FACTOR)
        self._passes.clear()
        self._loaded, self._version = None, _version_of(self.sources)
        self._write_recipe()

    def kept(self, weight: str, operand: Operand) -> Kept:
        factor, history, amax = (getattr(self, f"{weight}_{operand}_{what}") for what in ("factor", "history", "amax"))
        return Kept(factor=factor, history=history, amax=amax)

    def site(self, weight: str, sources: int, *, recording: bool) -> Site:
        """The site of the products with a weight. ``recording``: whether they raise its amaxes. ``sources``: as in ``measures``."""
        kept = {f"{name}.{of}": self.kept(name, of) for name, of in self.quantizers if name == weight}
        return Site(
            factors={name: one.factor for name, one in kept.items()},
            amaxes={name: one.amax for name, one in kept.items()} if recording else {},
            measured=self.measures(sources),
        )

    def measures(self, sources: int) -> bool:
        """Whether factors of earlier steps are those of other tensors: of another number of ``sources``, or of other weights."""
        # A load in place is seen by the version of what it wrote. A compiler asks for none, and traces what other loads have said.
        if not torch.compiler.is_compiling() and _version_of(self.sources) != self._version:
            self.notice_state()
        return self._loaded not in (None, 0, sources)

    def notice_state(self) -> None:
        """A state was loaded."""
        if not self.sources.is_meta:
            self._loaded, self._version = int(self.sources), _version_of(self.sources)

    def notice_other_weights(self) -> None:
        """Weights were loaded without a state."""
        self._loaded, self._version = OTHER, _version_of(self.sources)

    def notice_missing_end(self, weight: str, values: torch.Tensor) -> None:
        """Before a product with a weight raises its amaxes: warn where a step before has not ended by ``update_scales``.

        The weight does not change inside of a step, so its amax is that of the passes before. As reading it waits for the device, that is
        done in passes 2, 4, 8, ... only, and never again after the first ``update_scales``.
        """
        # Asked first: what a compiler has read and is other later, it compiles again.
        if torch.compiler.is_compiling() or self._ends or (weight, "weight") not in self.quantizers:
            return
        self._passes[weight] += 1
        passes = self._passes[weight]
        if passes == 1 or passes & (passes - 1):
            return
        now = amax_of(values.detach(), self.quantizers[weight, "weight"], ARRAYS)
        if int(now) != int(self.kept(weight, "weight").amax):
            warnings.warn(
                f"{self.label}: '{weight}' has changed, and no update_scales has ended the step before: with '{self.text}' all is "
                f"multiplied by factors of 1. Call update_scales(model) in every step, on every rank, after the last backward pass.",
                stacklevel=2,
            )

    def require_recipe(self) -> None:
        """Raises InputError where a load in place has written the state of another recipe."""
        theirs = shown(self.recipe)
        if theirs != self.text:
            raise InputError(f"{self.label}: {other_recipe('delayed.recipe', theirs, self.text)}")

    def overflow(self, sources: int) -> Mapping[tuple[str, Operand], torch.Tensor]:
        """Of each operand of a step whose amaxes are reduced, the largest element by the largest that its factor holds."""
        if self.measures(sources):
            return {}
        return {operand: self.kept(*operand).overflow(quantizer) for operand, quantizer in self.quantizers.items()}

    def follow(self, sources: int) -> None:
        """Go on to after a step, whose amaxes are reduced."""
        self._ends = True
        self.steps += 1
        self.sources.fill_(sources)
        self._loaded, self._version = None, _version_of(self.sources)
        for (weight, operand), quantizer in self.quantizers.items():
            self.kept(weight, operand).follow(quantizer, self.rule, self.steps)

    def extra_repr(self) -> str:
        return self.text

    def _write_recipe(self) -> None:
        self.recipe.copy_(torch.tensor(list(self.text.encode().ljust(RECIPE_BYTES, b"\0")), dtype=torch.uint8))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DelayedAmaxes:
        """A model that is cast to a narrow dtype keeps its histories: a cast leaves integers as they are."""

        def of_bits(one: torch.Tensor) -> torch.Tensor:
            return fn(one.view(torch.int32)).view(one.dtype) if one.dtype == torch.float32 else fn(one)

        loaded = _version_of(self.sources) != self._version
        super()._apply(of_bits, recurse)
        self._version = _version_of(self.sources) - loaded
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As PyTorch's, but another recipe's state is refused."""
        theirs = state_dict.get(f"{prefix}recipe")
        known = isinstance(theirs, torch.Tensor) and theirs.dtype == torch.uint8 and not theirs.is_meta
        text = shown(theirs) if known and theirs is not None else self.text
        if text != self.text:
            error_msgs.append(other_recipe(f"{prefix}recipe", text, self.text))
            # A load in place has written over it.
            self._write_recipe()
            return
        self._passes.clear()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if theirs is not None:
            self.notice_state()


def _version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; always 0 where PyTorch does not count."""
    return 0 if tensor.is_inference() else tensor._version
