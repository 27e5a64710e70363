"""A module's weights that rest as codes, by their names in its state.

| name | of a weight ``W`` |
|---|---|
| ``W`` | its main weight, float32, if it has one |
| ``resting.W_codes``, ``resting.W_scales`` | codes and scales of the copy that the output needs, or both products |
| ``resting.W_scale_of_tensor`` | the second scale, of a recipe that has one |
| ``resting.W_turned_codes``, ... | of the copy that the input's gradient needs, where that is another one; outputs are dim 0 here too |
| ``resting.recipe_text`` | the text of the recipe, in UTF-8 |

All have the placement of the weight; a scale that ranks share is replicated. What is loaded follows from what a state has:

| a state has of ``W`` | with a main weight | without | in high precision |
|---|---|---|---|
| both | both as they are | the codes as they are | ``W`` |
| ``W`` only | ``W``; its codes are those of it | the codes of it | ``W`` |
| codes only | the values of the codes | the codes as they are | the values of the codes |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.recipe import Recipe
from shardwright.engine_torch.io.private import elements_of, replace_elements
from shardwright.engine_torch.modules.codes.coded_weight import Held, coded_weight
from shardwright.engine_torch.modules.codes.copies import Copy, copies_of
from shardwright.engine_torch.modules.codes.quantizing import (
    ToQuantize,
    as_placed,
    held_of,
    quantize_together,
    require_blocks,
    require_weight_mesh,
)
from shardwright.engine_torch.own_program.naming import Instead
from shardwright.engine_torch.own_program.recipes import RECIPE_BYTES, other_codes, shown, text_of

RESTING = "resting"
"""The submodule that has the names of codes."""


class RestingState(nn.Module):
    """The codes of a module's weights. ``owner``: the module, whose parameters they are; ``weights``: the names of those that its
    recipe quantizes. It has no state where they are in high precision."""

    _owner: tuple[Any]

    def __init__(self, owner: nn.Module, weights: Iterable[str], recipe: Recipe | None, label: str) -> None:
        super().__init__()
        # In a tuple, so that the owner is no part of it.
        self._owner, self.label, self.names, self.recipe = (owner,), label, tuple(weights), recipe
        self.copies: Sequence[Copy] = () if recipe is None else copies_of(recipe)
        self.text = "" if recipe is None else text_of(recipe)

    def extra_repr(self) -> str:
        return ", ".join(name for name, *_ in self.weights())

    def held(self, name: str) -> Held | None:
        """What a weight consists of that is codes now, at rest or gathered; None: one that is shared with a module in high precision.

        Its codes are those of its main weight. Raises InputError for a weight of the owner's own that is in high precision still, and for codes of another recipe.
        """
        parameter = self.parameter(name)
        held = held_of(parameter)
        if held is None and not parameter.is_meta and self._owner[0].owns(name):
            raise InputError(
                f"{self.label}: '{name}' is to rest as codes, and is in high precision still. Call reset_parameters(defer_init=False) after "
                f"fully_shard; then load."
            )
        if held is None:
            return None
        if held.copies != self.copies:
            raise InputError(
                f"{self.label}: '{name}' is shared, and rests as codes of another recipe than its own. Give all modules that share a weight one "
                f"recipe, or leave out primary_weights."
            )
        if torch.compiler.is_compiling():
            return self._of_main(name, held) if held.written else held
        if held.is_stale(parameter):
            self.quantize_changed()
        return held

    def _of_main(self, name: str, held: Held) -> Held:
        """Codes of the main weight, where a compiler traces that it has changed: they serve this pass, and those at rest stay as they are."""
        assert held.main is not None
        now = Held(held.label, held.copies, (), None)
        quantize_together([self._to_quantize(name, now, held.main)])
        return now

    @property
    def is_wanted(self) -> bool:
        """Whether the owner's weights are to rest as codes."""
        return self._owner[0].primary_weights is not None

    def shape(self, name: str) -> torch.Size:
        """Of a weight on this rank."""
        return elements_of(self.parameter(name)).shape

    def weights(self) -> Iterator[tuple[str, torch.Tensor, Held]]:
        """Those that rest as codes now, with the parameter of each."""
        for name in self.names:
            parameter = self.parameter(name)
            if (held := held_of(parameter)) is not None:
                yield name, parameter, held

    @torch.no_grad()
    def rest(self, *, preserve: bool) -> None:
        """Have the weights rest as codes, that are the owner's own. ``preserve``: their values stay, for their main weights.

        Every rank that holds a shard calls this. Raises InputError where shards end inside of blocks, for a recipe without codes, and for
        another ``weight_mesh``.
        """
        assert self.recipe is not None
        new: list[ToQuantize] = []
        for name in filter(self._owner[0].owns, self.names):
            parameter, label = self.parameter(name), f"{self.label}: '{name}'"
            require_blocks(parameter, self.copies, self.recipe, self._owner[0].specs[name].tp_dim, label)
            owner = self._owner[0]
            require_weight_mesh(parameter, owner.weight_mesh, label, on_tp=owner.tp_mesh is not None)
            values = elements_of(parameter).detach()
            held = Held(label, self.copies, (), None)
            held.initial = values if preserve else None
            new.append(self._to_quantize(name, held, values))
        quantize_together(new)
        for weight in new:
            coded = coded_weight(weight.held, weight.values.shape, weight.values.device)
            replace_elements(weight.parameter, coded)

    @torch.no_grad()
    def return_to_values(self) -> None:
        """Have the weights that are the owner's own in high precision again, to be given other values."""
        for name, parameter, held in self.weights():
            if not self._owner[0].owns(name):
                continue
            values = torch.empty(self.shape(name), device=parameter.device) if held.main is None else held.main
            replace_elements(parameter, values)

    def quantize_changed(self) -> None:
        """The codes of main weights that have changed, where no optimizer's hook has made them."""
        stale = [weight for weight in self.to_quantize() if weight.held.is_stale(weight.parameter)]
        if stale:
            quantize_together(stale)

    def follow(self) -> None:
        """Other factors hold: codes are made again where main weights are there, in the next step of an optimizer or when they are used."""
        for _, _, held in self.weights():
            held.written = held.main is not None

    def to_quantize(self) -> Iterator[ToQuantize]:
        """Those with main weights, of which their codes are to be made."""
        for name, _, held in self.weights():
            if held.main is not None:
                yield self._to_quantize(name, held, held.main)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Codes and scales by their names, in the memory that they have."""
        arrays = {key: array for name, _, held in self.weights() for key, array in self._arrays(name, held).items()}
        return {**arrays, "recipe_text": self._recipe()} if arrays else {}

    @torch.no_grad()
    def main_weights(self) -> dict[str, torch.Tensor | None]:
        """By name, in the memory that they have; None: a weight has none."""
        return {
            name: None if held.main is None else as_placed(held.main, parameter, None, 0)
            for name, parameter, held in self.weights()
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], prefix: str, missing: list[str]) -> list[str]:
        """Take the weights of a state where it or the owner has codes, and return what is wrong with it. ``prefix``: of the owner's names.
        ``missing``: gets the names of weights of which the state has nothing, which stay as they are."""
        theirs = state.get(f"{prefix}{RESTING}.recipe_text")
        if theirs is not None and self.text not in ("", shown(theirs)) and not theirs.is_meta:
            return [other_codes(f"{prefix}{RESTING}.recipe_text", shown(theirs), self.text)]
        by_weight = {instead.weight: instead for instead in self.loads(prefix, state)}
        for name in self.names:
            weight, held = f"{prefix}{name}", held_of(self.parameter(name))
            instead = by_weight.get(weight, Instead(weight=weight))
            if held is None and instead.take is None:
                continue
            ours = (
                {weight: as_placed(held.main, self.parameter(name), None, 0)} if held and held.main is not None else {}
            )
            ours |= {} if held is None else self._named(prefix, self._arrays(name, held))
            wanted = {**{key: array for key, array in ours.items() if key not in instead.without}, **instead.read}
            lacking = [key for key in wanted if key not in state]
            if len(lacking) == len(wanted) > 0:
                missing.append(weight)
                continue
            if lacking:
                return [
                    f"'{weight}': neither it nor all of its codes are in the state, which lacks {', '.join(lacking)}."
                ]
            unlike = [
                f"'{key}': it is {tuple(theirs.shape)} in {theirs.dtype}, and must be {tuple(array.shape)} in {array.dtype}."
                for key, array in wanted.items()
                if (theirs := state[key]).shape != array.shape or (key != weight and theirs.dtype != array.dtype)
            ]
            if unlike:
                return unlike
            for key, array in wanted.items():
                array.copy_(state[key])
            if instead.take is not None:
                instead.take()
            elif held is not None:
                held.settle(self.parameter(name))
        return []

    def loaded_instead(self, prefix: str, saved: Collection[str]) -> Iterator[Instead]:
        """As ``loads``. ``prefix``: of the names of this module."""
        yield from self.loads(prefix.removesuffix(f"{RESTING}."), saved)

    def loads(self, prefix: str, saved: Collection[str]) -> Iterator[Instead]:
        """What is loaded by what a checkpoint has. ``prefix``: of the owner's names."""
        theirs = frozenset(key for key in saved if key.startswith(f"{prefix}{RESTING}."))
        recipe_text = f"{prefix}{RESTING}.recipe_text"
        for name in self.names:
            weight, held = f"{prefix}{name}", held_of(self.parameter(name))
            codes = frozenset(self._named(prefix, {key: None for key, *_ in self.array_names(name)}))
            has_codes = bool(codes) and codes.issubset(saved)
            if held is None and theirs:
                if weight in saved or not has_codes:
                    yield Instead(weight=weight, unread=theirs)
                    continue
                like = Held(self.label, self.copies, (), None)
                quantize_together([self._to_quantize(name, like, elements_of(self.parameter(name)).detach())])
                read = self._named(prefix, self._arrays(name, like))
                yield Instead(
                    weight=weight,
                    without=frozenset([weight]),
                    read=read,
                    unread=theirs - set(read),
                    take=partial(self._take_values_of, name, like),
                )
            elif held is not None and has_codes:
                if held.main is None:
                    yield Instead(weight=weight, unread=frozenset([weight]))
                elif weight in saved:
                    yield Instead(weight=weight, take=partial(held.settle, self.parameter(name)))
                else:
                    yield Instead(
                        weight=weight, without=frozenset([weight]), take=partial(self._take_values_of, name, held)
                    )
            elif held is not None and weight in saved:
                values = (
                    torch.empty(self.shape(name), device=held.arrays[0][0].device) if held.main is None else held.main
                )
                placed = as_placed(values, self.parameter(name), None, 0)
                yield Instead(
                    weight=weight,
                    without=codes | ({recipe_text} - theirs),
                    read={} if held.main is not None else {weight: placed},
                    unread=theirs,
                    take=partial(self._take_codes_of, name, values),
                )

    def take_codes(self) -> None:
        """Codes were written: main weights are their values."""
        for name, _, held in self.weights():
            if held.main is not None:
                self._take_values_of(name, held)

    @torch.no_grad()
    def _take_values_of(self, name: str, held: Held) -> None:
        values = self.copies[0].values(held.arrays[0], self.shape(name))
        target = elements_of(self.parameter(name)).detach() if held.main is None else held.main
        target.copy_(values)
        held.settle(self.parameter(name))

    def _take_codes_of(self, name: str, values: torch.Tensor) -> None:
        held = held_of(self.parameter(name))
        assert held is not None
        if held.main is not None and self._owner[0].delayed is not None:
            # When they are used: its factors are loaded after its weights.
            held.written = True
        else:
            quantize_together([self._to_quantize(name, held, values)])

    def array_names(self, name: str) -> Iterator[tuple[str, int, int]]:
        """For each array of a weight its name, the number of the copy and its own."""
        for number, copy in enumerate(self.copies):
            prefix = f"{name}_turned" if copy.turned else name
            yield f"{prefix}_codes", number, 0
            yield f"{prefix}_scales", number, 1
            if copy.quantizer.scale.of_tensor:
                yield f"{prefix}_scale_of_tensor", number, 2

    def _arrays(self, name: str, held: Held) -> dict[str, torch.Tensor]:
        return {
            key: as_placed(held.arrays[copy][number], self.parameter(name), self.copies[copy], number)
            for key, copy, number in self.array_names(name)
        }

    def _named(self, prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{prefix}{RESTING}.{key}": array for key, array in arrays.items()}

    def parameter(self, name: str) -> torch.Tensor:
        return getattr(self._owner[0], name)

    def _to_quantize(self, name: str, held: Held, values: torch.Tensor) -> ToQuantize:
        owner = self._owner[0]
        return ToQuantize(
            parameter=self.parameter(name),
            held=held,
            values=values,
            weight_mesh=owner.weight_mesh,
            delayed=None if owner.delayed is None else owner.delayed.kept(name, "weight"),
            measured=owner.delayed is not None and owner.delayed.measures(owner.num_sources),
        )

    def _recipe(self) -> torch.Tensor:
        return torch.tensor(list(self.text.encode().ljust(RECIPE_BYTES, b"\0")), dtype=torch.uint8)

    def __getattr__(self, name: str) -> Any:
        """Codes by their names: PyTorch asks a module for the tensors of its state."""
        arrays = self.arrays() if name.endswith(("_codes", "_scales", "_scale_of_tensor", "_text")) else {}
        return arrays[name] if name in arrays else super().__getattr__(name)

    def _save_to_state_dict(self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        del keep_vars
        self.quantize_changed()
        destination.update({f"{prefix}{name}": array for name, array in self.arrays().items()})

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The owner loads them, with its weights."""


def require_float32(module: Any, names: Iterable[str]) -> None:
    """Raises InputError for weights of another dtype: an optimizer needs gradients of that of its main weights."""
    dtypes = {name: getattr(module, name).dtype for name in names}
    wrong = next((name for name, dtype in dtypes.items() if dtype != torch.float32), None)
    if wrong is not None:
        raise InputError(
            f"{module.label}: '{wrong}' is {dtypes[wrong]}, and main weights of codes are float32, as their gradients must be. Leave out "
            f"params_dtype; for a computation in bfloat16 give fully_shard MixedPrecisionPolicy(param_dtype=torch.bfloat16), or use "
            f"torch.autocast."
        )
