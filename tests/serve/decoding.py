"""Whole requests through a runner that computes: by hand, or with a real engine on top."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dbench.serve.engine import Engine
from dbench.serve.engine_state import EngineLimits
from dbench.serve.families import FAMILIES, read_model_config
from dbench.serve.pages import PagePool
from dbench.serve.runner import Phase, Runner, Span
from dbench.serve.sequence import BlockEnd, BlockKey, BlockOutcome, BlockTask, SamplingParameters
from dbench.serve.torch_runner import RunnerConfig, TorchRunner, build_runner
from tests.serve.checkpoints import EOS, MASK

PAGE_SIZE = 8
NUM_PAGES = 640
MAX_ITERATIONS = 1000


def runner_for(
    directory: Path,
    block_length: int,
    *,
    dtype: str = "float32",
    num_slots: int = 16,
    mask_token_id: int = MASK,
    device: str = "cpu",
) -> TorchRunner:
    return build_runner(
        RunnerConfig(
            model_dir=directory,
            load_format="auto",
            dtype=dtype,
            device=device,
            seed=0,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            num_slots=num_slots,
            block_length=block_length,
            mask_token_id=mask_token_id,
            num_threads=1,
        )
    )


@dataclass
class Job:
    """One request on its way through the runner."""

    prompt: list[int]
    gen_length: int
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    seed: int = 0
    ignore_eos: bool = True
    start: int = 0
    """Iteration in which it joins."""
    ids: list[int] = field(default_factory=list)
    steps_per_block: list[int] = field(default_factory=list)
    fixed: dict[int, int] = field(default_factory=dict)
    """Positions of the running block -> their tokens."""
    error: str = ""
    is_done: bool = False


def task_of(job: Job, block_length: int, *, request_id: str = "test") -> BlockTask:
    num_masks = job.gen_length - len(job.ids)
    return BlockTask(
        key=BlockKey(request_id, len(job.ids) // block_length, 0),
        token_ids=(*job.prompt, *job.ids),
        num_masks=num_masks,
        block_length=block_length,
        sampling=job.sampling,
        request_seed=job.seed,
        ignore_eos=job.ignore_eos,
        arrival_s=0.0,
        num_remaining_blocks=num_masks // block_length,
    )


def limits_for(directory: Path, block_length: int, *, overlap: bool, max_tokens: int = 512) -> EngineLimits:
    """What a deployment of the model would allow, with 16 slots."""
    config = read_model_config(directory)
    return EngineLimits(
        max_batch_size=16,
        max_tokens_per_iteration=max_tokens,
        block_length=block_length,
        max_model_len=512,
        queue_policy="arrival_order",
        overlap=overlap,
        eos_token_ids=config.eos_token_ids,
        logit_shift=FAMILIES[config.family].logit_shift,
    )


def shuffled_pages(seed: int) -> PagePool:
    """A pool that lends its pages in no order."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    pages = list(pool.take(NUM_PAGES * PAGE_SIZE) or ())
    random.Random(seed).shuffle(pages)
    pool.give(tuple(pages))
    return pool


@contextmanager
def engine_on(runner: Runner, limits: EngineLimits, pages: PagePool | None = None) -> Iterator[Engine]:
    """An engine over the runner, which is closed at the end."""
    try:
        yield Engine(runner, pages or PagePool(NUM_PAGES, PAGE_SIZE), limits, worker_id=0)
    finally:
        runner.close()


def decode_all(engine: Engine, jobs: list[Job], block_length: int) -> list[Job]:
    """Run all jobs through one engine at once; the engine checks its pages when it goes idle."""
    waiting = deque(range(len(jobs)))
    running: dict[BlockKey, Job] = {}
    for _ in range(MAX_ITERATIONS):
        while waiting:
            number = waiting.popleft()
            task = task_of(jobs[number], block_length, request_id=str(number))
            running[task.key] = jobs[number]
            engine.submit(task)
        report = engine.step()
        if report is None:
            return jobs
        for end in report.ended:
            land_end(running.pop(end.key), end)
            if not jobs[int(end.key.request_id)].is_done:
                waiting.append(int(end.key.request_id))
    raise AssertionError(f"{len(running)} blocks never ended")


def land_end(job: Job, end: BlockEnd) -> None:
    job.steps_per_block.append(len(end.steps))
    job.ids += end.token_ids
    job.error = end.error
    job.is_done = end.outcome is not BlockOutcome.DONE or end.found_eos or len(job.ids) == job.gen_length


def run_jobs(runner: TorchRunner, jobs: list[Job], block_length: int, eos: Iterable[int] = (EOS,)) -> list[Job]:
    """Decode all jobs in common batches: job i in slot i, every block on other pages in shuffled order."""
    pages = list(range(NUM_PAGES))
    shuffler = random.Random(7)
    spans: dict[int, Span] = {}
    held: dict[int, list[int]] = {}
    iteration = 0
    while not all(job.is_done for job in jobs):
        assert iteration < MAX_ITERATIONS, "some block never ends"
        for slot, job in enumerate(jobs):
            if job.is_done or slot in spans or iteration < job.start:
                continue
            task = task_of(job, block_length)
            shuffler.shuffle(pages)
            count = -(-task.canvas_length // PAGE_SIZE)
            held[slot], pages = pages[:count], pages[count:]
            runner.attach(slot, task, tuple(held[slot]))
            job.fixed, spans[slot] = {}, Span(slot, Phase.REFRESH, 0, task.canvas_length)
            job.steps_per_block.append(0)
        iteration += 1
        result = runner.collect(runner.launch(tuple(spans.values()))) if spans else None
        for span in result.spans if result else ():
            job = jobs[span.slot]
            assert not span.void
            job.steps_per_block[-1] += 1
            job.fixed |= dict(zip(span.positions, span.token_ids, strict=True))
            start = len(job.prompt) + len(job.ids)
            if span.done:
                runner.detach(span.slot)
                pages += held.pop(span.slot)
                del spans[span.slot]
                land_block(job, span.error, range(start, start + block_length), set(eos))
            else:
                spans[span.slot] = Span(span.slot, Phase.DECODE, start, block_length)
    return jobs


def land_block(job: Job, error: str, block: range, eos: set[int]) -> None:
    for position in block:
        if error or position not in job.fixed:
            break
        job.ids.append(job.fixed[position])
        if job.fixed[position] in eos and not job.ignore_eos:
            job.is_done = True
            return
    job.error = error
    job.is_done = bool(error) or len(job.ids) == job.gen_length
