"""What the fields of values are checked with where they are built."""

from __future__ import annotations

from typing import Any

import attrs


def whole(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
    """Refuse what is no whole number; bool is one to Python, and to nobody who gives a count."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{attribute.name} must be a whole number, got {value!r}")


def positive(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
    """Refuse what is no whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{attribute.name} must be a whole number of at least 1, got {value!r}")


def not_negative(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
    """Refuse what is no whole number of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{attribute.name} must be a whole number of at least 0, got {value!r}")


def non_empty(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    """Refuse what is no string, or an empty one."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{attribute.name} must be a non-empty string, got {value!r}")
