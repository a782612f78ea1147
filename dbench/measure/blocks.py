"""Blocks and steps as columns, and what a request's blocks add up to.

The block frame has one row per block that left a worker, by request row and block index: its last attempt,
with `ready_s` of its first. So a failed attempt is waiting time of the block, and the parts of a request
still add up. Columns:

    row (of the request frame), request_id, block_index, worker_id, prefill_worker_id, outcome, num_attempts,
    ready_s, routed_s, finished_s (scheduler), received_s, refresh_start_s, refresh_end_s, kv_transfer_start_s
    (the worker that refreshed it), kv_transfer_end_s, decode_start_s, end_s (the worker that decoded it),
    num_passes, num_tokens

Where one worker did both, there is no prefill_worker_id and no transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dbench.events import BlockFinished

DONE = "done"


@dataclass(frozen=True, slots=True)
class Values:
    """A distribution over many requests: each value, and the row of the request that it belongs to."""

    rows: NDArray[np.int64]
    values: NDArray[np.float64]

    def of_rows(self, wanted: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.values[np.isin(self.rows, wanted)]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What the forward passes of finished blocks gave."""

    gaps: Values
    """request_time_between_tokens, one value per token but each request's first."""
    tokens_per_pass: Values
    """request_tokens_unmasked_per_forward_pass, one value per pass."""

    @property
    def by_metric(self) -> dict[str, Values]:
        return {
            "request_time_between_tokens": self.gaps,
            "request_tokens_unmasked_per_forward_pass": self.tokens_per_pass,
        }


def block_frame(finished: Sequence[BlockFinished], rows: Mapping[str, int]) -> pd.DataFrame:
    """`rows` maps request ids to rows of the request frame; every event's request must be in it."""
    attempts = pd.DataFrame(
        {
            "event": np.arange(len(finished)),
            "row": _ints([rows[e.request_id] for e in finished]),
            "request_id": pd.Series([e.request_id for e in finished], dtype=object),
            "block_index": _ints([e.block_index for e in finished]),
            "attempt": _ints([e.attempt for e in finished]),
            "worker_id": _ints([e.worker_id for e in finished]),
            "prefill_worker_id": pd.array([e.prefill_worker_id for e in finished], dtype="Int64"),
            "outcome": pd.Series([e.outcome for e in finished], dtype=object),
            "ready_s": _floats([e.ready_s for e in finished]),
            "routed_s": _floats([e.routed_s for e in finished]),
            "received_s": _floats([e.received_s for e in finished]),
            "refresh_start_s": _floats([e.refresh_start_s for e in finished]),
            "refresh_end_s": _floats([e.refresh_end_s for e in finished]),
            "kv_transfer_start_s": _floats([e.kv_transfer_start_s for e in finished]),
            "kv_transfer_end_s": _floats([e.kv_transfer_end_s for e in finished]),
            "decode_start_s": _floats([e.decode_start_s for e in finished]),
            "end_s": _floats([e.end_s for e in finished]),
            "finished_s": _floats([e.at_s for e in finished]),
            "num_passes": _ints([len(e.step_end_s) for e in finished]),
            "num_tokens": _ints([sum(e.step_num_unmasked) for e in finished]),
        }
    )
    attempts = attempts.sort_values(["row", "block_index", "attempt"], kind="stable")
    of_block = attempts.groupby(["row", "block_index"], sort=False)
    attempts["num_attempts"] = of_block["attempt"].transform("max") + 1
    attempts["ready_s"] = of_block["ready_s"].transform("min")
    return attempts.drop_duplicates(["row", "block_index"], keep="last").reset_index(drop=True)


def step_times(finished: Sequence[BlockFinished], blocks: pd.DataFrame) -> StepTimes:
    """The steps of all finished blocks, in the order of the frame, as gaps and counts."""
    done = blocks[blocks["outcome"] == DONE]
    events = [finished[i] for i in done["event"]]
    num_steps = done["num_passes"].to_numpy()
    total = int(num_steps.sum())
    rows = np.repeat(done["row"].to_numpy(dtype=np.int64), num_steps)
    ends = np.fromiter(chain.from_iterable(e.step_end_s for e in events), np.float64, total)
    counts = np.fromiter(chain.from_iterable(e.step_num_unmasked for e in events), np.int64, total)
    return StepTimes(_gaps(rows, ends, counts), Values(rows, counts.astype(np.float64)))


def block_times(blocks: pd.DataFrame) -> pd.DataFrame:
    """Durations of each block. Worker and scheduler times are never subtracted from each other.

    Times of two workers are, for a KV transfer alone: they are as good as the clock offsets, hence the clipping.
    """
    waited = (blocks["routed_s"] - blocks["ready_s"]) + (blocks["refresh_start_s"] - blocks["received_s"])
    refresh_end, sent, arrived = blocks["refresh_end_s"], blocks["kv_transfer_start_s"], blocks["kv_transfer_end_s"]
    is_split = sent.notna()
    kept = (sent - refresh_end).clip(lower=0).where(is_split, 0.0)  # refreshed, and nobody had pages for it
    here_since = arrived.where(is_split, refresh_end)
    not_hidden = (arrived - np.maximum(sent, refresh_end)).clip(lower=0)
    return pd.DataFrame(
        {
            "block_scheduling_delay_prefill": waited,
            "block_scheduling_delay_decode": kept + (blocks["decode_start_s"] - here_since),
            "block_prefill_time": blocks["refresh_end_s"] - blocks["refresh_start_s"],
            "block_kv_transfer_time": (arrived - sent).clip(lower=0).where(is_split, 0.0 * refresh_end),
            "block_kv_transfer_time_nonoverlapped": not_hidden.where(is_split, 0.0 * refresh_end),
            "block_decode_time": blocks["end_s"] - blocks["decode_start_s"],
            "block_total_time": blocks["finished_s"] - blocks["ready_s"],
        }
    )


def block_sums(blocks: pd.DataFrame, steps: StepTimes, num_requests: int) -> pd.DataFrame:
    """One row per request, by row: its finished blocks summed; NaN for a request without any."""
    is_done = blocks["outcome"] == DONE
    done = blocks[is_done]
    times = block_times(blocks)[is_done]
    first = times["block_scheduling_delay_prefill"].where(done["block_index"] == 0)
    columns = {
        "first_block_queue_s": first,
        "scheduling_delay_prefill_s": times["block_scheduling_delay_prefill"],
        "scheduling_delay_decode_s": times["block_scheduling_delay_decode"],
        "prefill_s": times["block_prefill_time"],
        "decode_s": times["block_decode_time"],
        "kv_transfer_s": times["block_kv_transfer_time"],
        "kv_transfer_nonoverlapped_s": times["block_kv_transfer_time_nonoverlapped"],
        "num_blocks": pd.Series(1.0, index=done.index),
    }
    sums = pd.DataFrame(columns, dtype=np.float64).groupby(done["row"]).sum(min_count=1).reindex(range(num_requests))
    retries = (blocks["num_attempts"] - 1).groupby(blocks["row"]).sum()
    sums["num_block_retries"] = retries.reindex(range(num_requests)).fillna(0).astype(np.int64)
    sums["mean_gap_s"] = _mean_per_row(steps.gaps, num_requests)
    sums["mean_tokens_per_pass"] = _mean_per_row(steps.tokens_per_pass, num_requests)
    return sums


def _gaps(rows: NDArray[np.int64], ends: NDArray[np.float64], counts: NDArray[np.int64]) -> Values:
    """A step that fixes k tokens: the gap since the last step of its request that fixed any, and k - 1 zeros."""
    fixes = counts > 0
    rows, ends, counts = rows[fixes], ends[fixes], counts[fixes]
    follows = np.zeros(rows.size, dtype=bool)
    follows[1:] = rows[1:] == rows[:-1]
    gaps = np.diff(ends, prepend=0.0)[follows]
    num_zeros = counts - 1
    values = np.concatenate([gaps, np.zeros(int(num_zeros.sum()))])
    return Values(np.concatenate([rows[follows], np.repeat(rows, num_zeros)]), values)


def _mean_per_row(values: Values, num_requests: int) -> NDArray[np.float64]:
    counts = np.bincount(values.rows, minlength=num_requests)
    sums = np.bincount(values.rows, weights=values.values, minlength=num_requests)
    means = np.full(num_requests, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _floats(values: Sequence[float | None]) -> NDArray[np.float64]:
    """None becomes NaN."""
    return np.array(values, dtype=np.float64)


def _ints(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
