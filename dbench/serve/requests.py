"""All requests that a scheduler knows: those that run, and for a while those that have ended."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable

from dbench.serve.scheduler_records import SchedulerRules
from dbench.serve.sequence import Request, Status, derive_request_seed
from dbench.serve.tracking import RequestShape, TrackedRequest
from dbench.serve.wire import Submission


class Requests:
    """From their submission until they are forgotten, by age or by number."""

    def __init__(self, rules: SchedulerRules, new_id: Callable[[], str]) -> None:
        self.running: dict[str, TrackedRequest] = {}
        self.num_by_status: dict[Status, int] = dict.fromkeys((s for s in Status if s.is_final), 0)
        """Of all that have ended."""
        self._rules = rules
        self._new_id = new_id
        self._finished: OrderedDict[str, TrackedRequest] = OrderedDict()  # oldest first
        self._num_submitted = 0

    def add(self, submission: Submission, now_s: float) -> TrackedRequest:
        """Keep a request that has been checked, with defaults and seed filled in."""
        limits = self._rules.limits
        prompt, gen_length = submission.prompt_token_ids, submission.gen_length
        sampling = submission.sampling.with_defaults()
        seed = submission.request_seed
        if seed is None:
            seed = derive_request_seed(prompt, gen_length, sampling, limits.block_length)
        request = Request(self._new_id(), prompt, gen_length, sampling, seed, submission.ignore_eos, now_s)
        shape = RequestShape(
            num_prompt_tokens=len(prompt),
            num_masks=limits.num_masks(gen_length),
            block_length=limits.block_length,
            num_blocks=gen_length // limits.block_length,
        )
        self._num_submitted += 1
        tracked = TrackedRequest(request, shape, self._num_submitted, array("i", prompt), ready_s=now_s)
        self.running[request.request_id] = tracked
        return tracked

    def find(self, request_id: str) -> TrackedRequest | None:
        return self.running.get(request_id) or self._finished.get(request_id)

    def finish(self, tracked: TrackedRequest, status: Status, error: str, now_s: float) -> None:
        """Set the one final status."""
        tracked.finish(status, error, now_s)
        request_id = tracked.request.request_id
        del self.running[request_id]
        self._finished[request_id] = tracked
        self.num_by_status[status] += 1

    def forget_old(self, now_s: float) -> None:
        while self._finished:
            oldest = next(iter(self._finished.values()))
            assert oldest.completion_s is not None, "a finished request without its time"
            is_old = now_s - oldest.completion_s > self._rules.retention_s
            if not is_old and len(self._finished) <= self._rules.retention_number:
                return
            del self._finished[oldest.request.request_id]
