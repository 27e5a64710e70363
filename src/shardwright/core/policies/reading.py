"""Reads a policy of recomputation from the values of a file. An error has its place.

```yaml
policy:
  - layers: 0:16                     # a slice, a number, or a stack; without it: all layers that no part before has
    base: full                       # full, dots or none; full where it is left out
    keep: [attention.output]         # activations of the model's table, and `weights`
    host: [residual.stream]
    recompute: []
  - base: dots
```
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.findings.position import Located
from shardwright.core.policies.policy import BASES, CHANGES, Part, Policy, part_of, read_policy

KEYS = ("layers", "base", *CHANGES)


def read_policy_file(source: Located) -> Policy:
    """The policy that a file declares. Raises InputError, with the place, for what is none."""
    top = source.value
    if not isinstance(top, Mapping) or set(top) != {"policy"}:
        raise InputError(f"{_at(source)}: a policy is a mapping with one key, 'policy', and a list of parts under it.")
    listed = top["policy"]
    parts = listed.value if isinstance(listed.value, tuple) else (listed,)
    if not parts:
        raise InputError(f"{_at(listed)}: the policy has no part. Give one, as - base: dots.")
    # The text is read again, so that a file and a command line are checked by the same rules.
    return read_policy("+".join(_part(part).text for part in parts), f"{_at(source)}: the policy")


def _part(node: Located) -> Part:
    if not isinstance(node.value, Mapping):
        raise InputError(f"{_at(node)}: a part of a policy is a mapping with some of {', '.join(KEYS)}.")
    for key in node.value:
        if key not in KEYS:
            raise InputError(f"{_at(node)}: '{key}' is no key of a policy. {did_you_mean(str(key), KEYS)}")
    base = node.value.get("base")
    name = BASES[0] if base is None else base.value
    if name not in BASES:
        where = node if base is None else base
        raise InputError(
            f"{_at(where)}: '{name}' is no policy by name. {did_you_mean(str(name), BASES)} Names of activations are listed under 'keep'."
        )
    changes = {how: _names(node.value[how], how) for how in CHANGES if how in node.value}
    layers = node.value.get("layers")
    return part_of(name, changes, None if layers is None else str(layers.value), _at(node))


def _names(node: Located, how: str) -> tuple[str, ...]:
    found = []
    for each in node.value if isinstance(node.value, tuple) else [node]:
        if not isinstance(each.value, str) or not each.value.replace(".", "").replace("_", "").isalnum():
            raise InputError(f"{_at(each)}: '{how}' lists names of activations, as attention.output.")
        found.append(each.value)
    return tuple(found)


def _at(node: Located) -> str:
    return str(node.position)
