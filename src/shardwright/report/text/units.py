"""Numbers with units, for people. The rest of the code has bytes and seconds."""

from __future__ import annotations

from shardwright.core.layout.wording import plural

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL = ("", " K", " M", " B", " T")


def pretty_bytes(number: int | float) -> str:
    """Three or four digits and a binary unit.

    >>> [pretty_bytes(n) for n in (0, 1023, 1024, 1536, 10 * 1024**2, 123_456_789_012)]
    ['0 B', '1023 B', '1.00 KiB', '1.50 KiB', '10.0 MiB', '115 GiB']
    """
    value, unit = float(number), 0
    while abs(value) >= 1024 and unit + 1 < len(BINARY):
        value, unit = value / 1024, unit + 1
    return f"{number:.0f} B" if unit == 0 else f"{_digits(value)} {BINARY[unit]}"


def pretty_count(number: int) -> str:
    """A count with a decimal unit.

    >>> [pretty_count(n) for n in (999, 6_160_000, 671_026_419_200)]
    ['999', '6.16 M', '671 B']
    """
    value, unit = float(number), 0
    while value >= 1000 and unit + 1 < len(DECIMAL):
        value, unit = value / 1000, unit + 1
    return str(number) if unit == 0 else f"{_digits(value)}{DECIMAL[unit]}"


def short_count(number: int) -> str:
    """A count with a decimal unit and no more digits than it has.

    >>> [short_count(n) for n in (999, 15 * 10**12, 1_500_000_000, 20_123)]
    ['999', '15T', '1.5B', '20.12K']
    """
    value, unit = float(number), 0
    while value >= 1000 and unit + 1 < len(DECIMAL):
        value, unit = value / 1000, unit + 1
    return f"{value:.4g}{DECIMAL[unit].strip()}"


def pretty_seconds(seconds: float) -> str:
    """
    >>> [pretty_seconds(s) for s in (0.0000123, 0.0451, 12.3)]
    ['12.3 us', '45.1 ms', '12.3 s']
    """
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def rounded(number: float, digits: int = 4) -> str:
    """A number to so many digits, written out: no estimate is more exact.

    >>> [rounded(n) for n in (4_287_900.0, 1.5763, 0.00816, 0.0, 99_999.0)], rounded(697.9, 3)
    (['4,288,000', '1.576', '0.00816', '0', '100,000'], '698')
    """
    value = float(f"{number:.{digits}g}")
    return f"{value:,.0f}" if value == int(value) else f"{value:,.{digits}g}"


def several(number: int, noun: str) -> str:
    """
    >>> several(1, "file"), several(2000, "box")
    ('1 file', '2,000 boxes')
    """
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def _digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
