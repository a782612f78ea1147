"""Values as strict JSON takes them: one rule for files, messages between processes and --json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def strict(value: Any) -> Any:
    """The value with NaN as null, infinities as the texts "inf" and "-inf", and tuples as lists, however deep."""
    if isinstance(value, Mapping):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else finite_or_text(value)


def finite_or_text(value: Any) -> Any:
    """The value, a number that JSON has no form for as the text that float() reads back: "inf", "-inf" or "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
