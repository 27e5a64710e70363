"""Values that are keys of many look-ups: their hash is computed once.

What follows from a layout is derived again for each plan, from the same rows of a table, specs and mesh. Functions that derive it remember what
they derived (``lru_cache``). To hash a nested dataclass takes longer than most of them.
"""

from __future__ import annotations

from collections.abc import Hashable


class HashedOnce:
    """The base of such a value, which is frozen. Its ``__hash__`` is ``hash_of_key`` of what tells it from others, and may leave out what cannot be hashed."""

    __slots__ = ("_hash",)
    _hash: int

    def hash_of_key(self, *key: Hashable) -> int:
        """The hash of ``key``, kept for the next time."""
        object.__setattr__(self, "_hash", hash(key))
        return self._hash
