"""What becomes of values that JSON has no form for."""

from __future__ import annotations

import math
from types import MappingProxyType

import pytest

from dbench.json_values import finite_or_text, strict


def test_strict_values_are_null_text_and_lists_however_deep() -> None:
    value = MappingProxyType({"a": (1.5, math.nan), "b": {"c": math.inf}, "d": [-math.inf, "x", True, None]})
    assert strict(value) == {"a": [1.5, None], "b": {"c": "inf"}, "d": ["-inf", "x", True, None]}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_number_without_a_form_becomes_the_text_that_float_reads_back(number: float) -> None:
    text = finite_or_text(number)
    assert isinstance(text, str)
    assert float(text) == pytest.approx(number, nan_ok=True)


@pytest.mark.parametrize("value", [1.5, 3, "inf", None, True])
def test_every_other_value_stays(value: object) -> None:
    assert finite_or_text(value) is value
