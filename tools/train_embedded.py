"""Trains the embedded model: a small masked-diffusion model of the LLaDA family, on problems that can be checked.

The data is drawn by this script from its seed. The directory it writes is a model that dbench serves, with
training.json beside it: settings, loss curve, and accuracy and tokens per forward pass of every task, on problems that
training never sees. A run that is killed leaves its last checkpoint. Run from the repository root:
    python tools/train_embedded.py --out DIR --minutes 8
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dbench.errors import DbenchError, UsageError
from dbench.load.tasks import held_out
from dbench.models import embedded_directory
from dbench.serve.families import ModelConfig, read_model_config
from tools.embedded_training.data import TASK_NAMES, TASK_WEIGHTS, ChatFrame, Rows, draw_rows, read_chat_frame
from tools.embedded_training.files import REPORT_NAME, WEIGHTS_NAME, prepare_directory, write_json

logger = logging.getLogger("train_embedded")

DEFAULT_BATCH = 504
REPORT_SEED = 1
FINAL_SEED = 0
DECODE_VARIANTS = (("float32", True), ("bfloat16", True), ("float32", False))
"""Of the final evaluation: number format, and whether keys and values are kept between a block's refresh and end."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write; a dbench model directory")
    parser.add_argument("--config", type=Path, default=embedded_directory(), help="directory with config and tokenizer")
    parser.add_argument("--init-from", type=Path, help="start from the weights in this directory, not at random")
    parser.add_argument("--minutes", type=float, help="end training this long after the start; 8 without --steps")
    parser.add_argument("--steps", type=positive, help="end training after so many steps")
    parser.add_argument("--batch", type=positive, default=DEFAULT_BATCH, help="sequences of 128 tokens in a step")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--warmup-steps", type=int, default=500)
    parser.add_argument("--problems", type=positive, default=6_000_000, help="training problems to draw")
    parser.add_argument("--processes", type=positive, default=os.cpu_count(), help="that draw them")
    parser.add_argument("--report-every", type=positive, default=2000, help="steps between evaluations and checkpoints")
    parser.add_argument("--report-problems", type=positive, default=350, help="held-out problems of such an evaluation")
    parser.add_argument(
        "--final-problems", type=positive, default=1400, help="held-out problems of the last evaluation"
    )
    parser.add_argument("--device", help="cuda or cpu; cuda where there is one")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile; on with cuda")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.minutes is None and arguments.steps is None:
        arguments.minutes = 8.0
    return arguments


def positive(text: str) -> int:
    """A count on the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a whole number at least 1")
    return number


def main() -> None:
    """Parse, draw the data, train, evaluate; torch is imported here so that the data's processes do without it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started_s = time.monotonic()
    arguments = parse_arguments()
    try:
        run(arguments, started_s)
    except DbenchError as error:
        raise SystemExit(f"train_embedded: {error}") from error


def run(arguments: argparse.Namespace, started_s: float) -> None:
    config, frame = read_model_config(arguments.config), read_chat_frame(arguments.config)
    if config.mask_token_id is None:
        raise UsageError(f"{arguments.config}/config.json names no mask_token_id; training needs one")
    prepare_directory(arguments.config, arguments.out)
    rows = draw_rows(frame, arguments.problems, arguments.seed, arguments.processes)
    logger.info("%d problems drawn after %.1f s", len(rows), time.monotonic() - started_s)
    report = train(arguments, config, frame, rows, started_s)
    report["final"] = evaluate_final(arguments, config, frame)
    report["wall_time_s"] = round(time.monotonic() - started_s, 1)
    write_json(arguments.out / REPORT_NAME, report)
    logger.info("written to %s after %.0f s", arguments.out, time.monotonic() - started_s)


def train(
    arguments: argparse.Namespace, config: ModelConfig, frame: ChatFrame, rows: Rows, started_s: float
) -> dict[str, Any]:
    """Train to the limit, saving as it goes; gives the report so far."""
    import torch

    from tools.embedded_training.decode import DecodeSettings, answer_all, score
    from tools.embedded_training.loop import LoopSettings, Progress, Trainer, tokens_per_step
    from tools.embedded_training.masking import Sampler
    from tools.embedded_training.network import load_weights, make_network, save_weights

    device = find_device(arguments.device)
    is_cuda = device.type == "cuda"
    wants_compiled = is_cuda if arguments.compile is None else arguments.compile
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    dtype = torch.bfloat16 if is_cuda else torch.float32
    network = make_network(config, dtype, device, tokens_per_step(arguments.batch) if wants_compiled else 0)
    network.initialise(arguments.seed)
    if arguments.init_from is not None:
        load_weights(network, arguments.init_from / WEIGHTS_NAME)
    sampler = Sampler(rows, config, device, arguments.seed)
    settings = LoopSettings(
        batch=arguments.batch,
        peak_rate=arguments.rate,
        warmup_steps=arguments.warmup_steps,
        max_steps=arguments.steps,
        deadline_s=None if arguments.minutes is None else started_s + 60.0 * arguments.minutes,
        report_every=arguments.report_every,
        seed=arguments.seed,
    )
    trainer = Trainer(network, sampler, settings)
    trainer.average.dtype = network.dtype
    report = describe(arguments, rows, sum(parameter.numel() for parameter in network.parameters()))
    report["evaluations"] = []
    problems = held_out(REPORT_SEED, arguments.report_problems)

    def save(progress: Progress) -> None:
        save_weights(trainer.average, arguments.out / WEIGHTS_NAME)
        scores = score(answer_all(trainer.average, frame, problems, DecodeSettings()))
        report["evaluations"].append({"step": progress.step} | {name: s.to_dict() for name, s in scores.items()})
        report.update(asdict(progress), wall_time_s=round(time.monotonic() - started_s, 1))
        write_json(arguments.out / REPORT_NAME, report)
        shown = "  ".join(f"{name} {result.accuracy:.1%}" for name, result in scores.items())
        logger.info("step %d: %s  tokens/pass %.2f", progress.step, shown, scores["all"].tokens_per_pass)

    logger.info("training starts after %.1f s", time.monotonic() - started_s)
    trainer.run(save)
    return report


def evaluate_final(arguments: argparse.Namespace, config: ModelConfig, frame: ChatFrame) -> dict[str, Any]:
    """Ask the saved weights all final problems in every variant, print a table of each, and give the scores."""
    import torch

    from tools.embedded_training.decode import DecodeSettings, answer_all, score, table
    from tools.embedded_training.network import load_weights, make_network

    device = find_device(arguments.device)
    problems = held_out(FINAL_SEED, arguments.final_problems)
    found: dict[str, Any] = {"seed": FINAL_SEED, "threshold": DecodeSettings().threshold}
    for dtype, kept_keys in DECODE_VARIANTS:
        network = make_network(config, getattr(torch, dtype), device)
        load_weights(network, arguments.out / WEIGHTS_NAME)
        settings = replace(DecodeSettings(), kept_keys=kept_keys)
        answers = answer_all(network, frame, problems, settings)
        scores = score(answers)
        name = f"{dtype}, {'exact cache' if kept_keys else 'full recomputation'}"
        found[name] = {task: result.to_dict() for task, result in scores.items()}
        found[name]["wrong"] = [
            {"prompt": answer.problem.prompt, "wanted": answer.problem.answer, "got": answer.text}
            for answer in answers
            if not answer.is_right
        ][:20]
        print(
            f"\n{name}, {settings.gen_length} tokens in blocks of {settings.block_length}\n{table(scores)}", flush=True
        )
    return found


def find_device(name: str | None) -> Any:
    """The torch device to use."""
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def describe(arguments: argparse.Namespace, rows: Rows, num_parameters: int) -> dict[str, Any]:
    """What a model card says of a run before it starts."""
    import torch

    counts = [int((rows.task_N == number).sum()) for number in range(len(TASK_NAMES))]
    device = find_device(arguments.device)
    return {
        "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in sorted(vars(arguments).items())},
        "num_parameters": num_parameters,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "training_problems": dict(zip(TASK_NAMES, counts, strict=True)),
        "task_weights": TASK_WEIGHTS,
    }


if __name__ == "__main__":
    main()
