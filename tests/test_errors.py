"""What errors say of names that nothing has."""

from __future__ import annotations

import pytest

from dbench.errors import near_name, unknown_name

OPTIONS = ("gpus", "model", "num_requests", "qps", "seed", "trace")


@pytest.mark.parametrize(
    ("got", "meant"),
    [("qpss", "qps"), ("qpz", "qps"), ("modle", "model"), ("um_requests", "num_requests"), ("tarce", "trace")],
)
def test_a_name_with_a_slip_brings_the_one_that_was_meant(got: str, meant: str) -> None:
    assert near_name(got, OPTIONS) == meant
    assert f"{got!r}; did you mean {meant!r}? (known: gpus, model" in unknown_name("option", got, OPTIONS)


@pytest.mark.parametrize("got", ["bogus", "port", "", "requester", "x"])
def test_a_name_that_is_far_from_all_brings_none(got: str) -> None:
    assert near_name(got, OPTIONS) is None
    assert unknown_name("option", got, OPTIONS).startswith(f"unknown option {got!r} (known: gpus, model")
