"""Every option with choices offers exactly the keys of the table that it chooses from."""

from __future__ import annotations

import logging
from collections.abc import Collection

import pytest

from dbench.load.arrivals import ARRIVALS
from dbench.options import COMMAND_SECTIONS, WORKER_KINDS, Option, options_of
from dbench.serve.placement import PLACERS
from dbench.serve.policy import QUEUE_ORDERS, SPANS
from dbench.serve.refresh_attention import REFRESH_BACKENDS
from dbench.serve.routes import DECODE_ROUTES, PREFILL_ROUTES
from dbench.serve.torch_runner import DTYPES
from dbench.serve.weights import LOAD_FORMATS
from dbench.unmasking_rules import UNMASKING_RULES

TABLES: dict[str, Collection[str]] = {
    "mode": PLACERS,
    "prefill_scheduler_policy": PREFILL_ROUTES,
    "decode_scheduler_policy": DECODE_ROUTES,
    "prefill_queue_policy": QUEUE_ORDERS,
    "cache_mode": SPANS,
    "load_format": LOAD_FORMATS,
    "attention_backend": {"auto", *REFRESH_BACKENDS},
    "dtype": {"auto", *DTYPES},
    "unmasking_strategy": UNMASKING_RULES,
    "interval_type": ARRIVALS,
    "length_type": {"trace", "fixed"},  # two branches of length_source, no table
    "worker_type": WORKER_KINDS,
    "log_level": {name.lower() for name in logging.getLevelNamesMapping()} - {"critical", "fatal", "warn", "notset"},
}

SECTIONS = {section: None for sections in COMMAND_SECTIONS.values() for section in sections}
CHOOSING = {option.name: option for section in SECTIONS for option in options_of(section) if option.spec.choices}


@pytest.mark.parametrize("option", CHOOSING.values(), ids=CHOOSING)
def test_choices_are_the_keys_of_the_table(option: Option) -> None:
    assert set(option.spec.choices) == set(TABLES[option.name])
