"""The first work of a runner, before any block comes: whatever is made at a first call is made then."""

from __future__ import annotations

from dbench.serve.runner import Phase, Runner, Span
from dbench.serve.sequence import BlockKey, BlockTask, SamplingParameters


def warm_up(runner: Runner, *, block_length: int, page_size: int, logit_shift: int) -> None:
    """Decode one token in slot 0, which must be free, over the first pages, whose content is lost."""
    task = BlockTask(
        key=BlockKey("warm-up", 0, 0),
        token_ids=(0,),
        num_masks=block_length,
        block_length=block_length,
        sampling=SamplingParameters("conf_quota", temperature=1.0, fixed_unmask_quota=1),
        request_seed=0,
        ignore_eos=True,
        arrival_s=0.0,
        num_remaining_blocks=1,
    )
    runner.attach(0, task, tuple(range(-(-task.canvas_length // page_size))))
    decode = Span(0, Phase.DECODE, 1 - logit_shift, block_length + logit_shift, written_from=1)
    spans = (Span(0, Phase.REFRESH, 0, task.canvas_length), decode)
    tickets = [runner.launch((span,)) for span in spans]
    for ticket in tickets:
        runner.collect(ticket)
    runner.detach(0)
