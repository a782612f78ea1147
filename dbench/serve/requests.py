"""All requests that a scheduler knows: those that run, and for a while those that have ended."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from dbench.serve.finished import FinishedRequests
from dbench.serve.scheduler_records import SchedulerRules
from dbench.serve.sequence import BlockKey, Request, Status, derive_request_seed
from dbench.serve.tracking import RequestShape, TrackedRequest
from dbench.serve.wire import PollState, Submission


class Requests:
    """From their submission until they are forgotten, by age or by number."""

    def __init__(self, rules: SchedulerRules, new_id: Callable[[], str]) -> None:
        self.running: dict[str, TrackedRequest] = {}
        self.num_by_status: dict[Status, int] = dict.fromkeys((s for s in Status if s.is_final), 0)
        """Of all that have ended."""
        self.finished = FinishedRequests(rules.retention, rules.mask_token_id)
        self._rules = rules
        self._new_id = new_id
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

    def held_by(self, worker_id: int, key: BlockKey) -> TrackedRequest | None:
        """The request whose current attempt this is, on this worker; None for anything late or foreign."""
        tracked = self.running.get(key.request_id)
        if tracked is None or worker_id not in tracked.holder_ids or tracked.key != key:
            return None
        return tracked

    def poll(self, request_id: str) -> PollState | None:
        """What Poll says of a request; None for one that is not known, or no longer."""
        tracked = self.running.get(request_id)
        if tracked is not None:
            return tracked.poll_state(self._rules.mask_token_id)
        return self.finished.poll(request_id)

    def finish(self, tracked: TrackedRequest, status: Status, error: str, now_s: float) -> None:
        """Set the one final status."""
        tracked.finish(status, error, now_s)
        request_id = tracked.request.request_id
        del self.running[request_id]
        self.finished.add(request_id, tracked.poll_state(self._rules.mask_token_id), tracked.tokens)
        self.num_by_status[status] += 1

    def forget_old(self, now_s: float) -> None:
        """Let go of finished requests beyond the retention."""
        self.finished.forget_old(now_s)
