"""An object store in memory whose requests can be counted, refused and made the last: an oracle of what a killed process leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

SCHEME = "faulty"


class Killed(BaseException):
    """The process ends here: nothing catches this, and no later request of it arrives."""


class FaultyFileSystem(MemoryFileSystem):
    """``before``: called with the name and the path of each request that changes the store, before it does."""

    protocol = SCHEME
    store: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
    pseudo_dirs = [""]  # noqa: RUF012 - as its parent has it
    before: ClassVar[Callable[[str, str], None]] = lambda *_: None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace(f"{SCHEME}://", "memory://") if isinstance(path, str) else path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        type(self).before("create" if mode == "create" else "put", path)
        super().pipe_file(path, value, mode=mode, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # What is written at once comes from pipe_file.
        if mode == "wb" and "data" not in kwargs:
            return Upload(self, path)
        return super()._open(path, mode=mode, **kwargs)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        type(self).before("delete", path)
        self.store.pop(path, None)

    def rm(self, path: Any, **_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Patterns are expanded, as clients do; then a store deletes one object after the other.
        for one in self.expand_path(path):
            self.rm_file(one)


class Upload(MemoryFile):
    """An upload of several parts: its object appears when it is closed."""

    def __init__(self, system: FaultyFileSystem, path: str) -> None:
        super().__init__(system, path)
        self.system = system

    def write(self, data: Any) -> int:
        type(self.system).before("part", str(self.path))
        return super().write(data)

    def close(self) -> None:
        if getattr(self, "given_up", False) or self.path in self.system.store:
            return
        type(self.system).before("end of parts", str(self.path))
        self.commit()

    def discard(self) -> None:
        self.given_up = True

    @property
    def closed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False

    @closed.setter
    def closed(self, value: bool) -> None:
        del value

    def __del__(self) -> None:
        """Nothing: an upload that was not ended never becomes an object."""


def keys() -> list[str]:
    """The objects of the store, by name."""
    return sorted(path.lstrip("/") for path in FaultyFileSystem.store)


fsspec.register_implementation(SCHEME, FaultyFileSystem, clobber=True)
