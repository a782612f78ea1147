"""What follows from resolved options and the model that they name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbench.serve.deployment import Deployment, deployment_of
from tests.serve.server_builders import options


def deployment(**given: object) -> Deployment:
    """Of the embedded model, which has 6 layers; options that a CPU refuses are set after they were resolved."""
    engine, _, _ = options()
    return deployment_of(replace(engine, **given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "max_batch_size", "captured"),
    [
        ("1,2,4", 128, (1, 2, 4)),
        ("64, 1,1", 128, (1, 64)),
        ("1,2,4,8", 5, (1, 2, 4, 5)),
        ("32,64", 3, (3,)),
    ],
)
def test_captured_sizes_are_those_given_none_larger_than_the_largest_batch(
    given: str, max_batch_size: int, captured: tuple[int, ...]
) -> None:
    made = deployment(cuda_graph_batch_sizes=given, max_batch_size=max_batch_size)
    assert made.graph_batch_sizes() == captured


@pytest.mark.parametrize(("num_layers", "layer"), [(2, 0), (3, 1), (6, 3), (32, 16)])
def test_the_middle_layer_is_measured_but_never_the_last(num_layers: int, layer: int) -> None:
    made = deployment(enable_operation_metrics=True)
    assert replace(made, model=replace(made.model, n_layers=num_layers)).measured_layer() == layer


def test_a_layer_is_measured_only_where_that_is_wanted() -> None:
    assert deployment(op_metrics_layer_id=1).measured_layer() is None
    assert deployment(op_metrics_layer_id=1, enable_operation_metrics=True).measured_layer() == 1


def test_nothing_is_captured_where_steps_compute_whole_canvases() -> None:
    assert deployment(cache_mode="none").graph_batch_sizes() == ()
    assert deployment(enable_cuda_graphs=False).graph_batch_sizes() == ()


def test_a_worker_that_only_refreshes_captures_nothing() -> None:
    assert deployment().graph_batch_sizes()
    assert deployment().graph_batch_sizes(refresh_only=True) == ()
