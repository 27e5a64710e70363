"""Values to read back, and values without their positions."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from shardwright.core.findings.position import Located

JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda children: st.one_of(st.lists(children, max_size=4), st.dictionaries(st.text(), children, max_size=4)),
    max_leaves=12,
)


def plain(located: Located) -> object:
    """The value without positions, as ``json.loads`` gives it."""
    value = located.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value
