"""Which packages are installed, asked without importing any."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str | None:
    """The version of an installed package; None where it is not there.

    >>> installed_version("no-such-package-at-all") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
