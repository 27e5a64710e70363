"""Buffers that no checkpoint holds: of a module that was made on ``meta``, they have what ``to_empty`` left in memory until the program fills
them."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from torch import nn


def unsaved_on_meta(module: nn.Module) -> frozenset[str]:
    """The buffers without values that are not in the module's state dict."""
    on_meta = {name for name, buffer in module.named_buffers() if buffer.is_meta}
    return frozenset(on_meta - module.state_dict().keys()) if on_meta else frozenset()


def warn_of_not_finite(module: nn.Module, names: Collection[str]) -> None:
    """Warn of the first of these buffers that is not finite. A mask may have -inf."""
    for name, buffer in module.named_buffers():
        if name not in names or buffer.is_meta or not buffer.is_floating_point():
            continue
        values = buffer.float()
        if bool((values.isnan() | values.isposinf()).any()):
            warnings.warn(
                f"buffer '{name}' is not finite. No checkpoint holds it, and the module was made on `meta`: fill it after `to_empty`.",
                RuntimeWarning,
                stacklevel=2,
            )
            return
