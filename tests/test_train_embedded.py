"""The embedded model's training: its data, its masks, its arithmetic beside dbench's own, and a small run."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dbench.errors import ModelError
from dbench.load.tasks import Problem, held_out, is_held_out
from dbench.models import embedded_directory
from dbench.serve.attention import SdpaBackend
from dbench.serve.batch import SlotSizes, SlotTable, pack
from dbench.serve.families import ModelConfig, read_model_config
from dbench.serve.kv import KvPool
from dbench.serve.model import Model
from dbench.serve.runner import Phase, Span
from dbench.serve.sequence import BlockKey, BlockTask, SamplingParameters
from dbench.serve.weights import WeightSource, load_weights
from tools import train_embedded
from tools.embedded_training import data, network
from tools.embedded_training.decode import DecodeSettings, answer_all
from tools.embedded_training.loop import tokens_per_step
from tools.embedded_training.masking import SHAPES, STREAM, Sampler
from tools.embedded_training.network import Network, Streams

CPU = torch.device("cpu")
SMALL = {"d_model": 32, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 64}
MASK, END = 258, 257
BLOCK = 8


@pytest.fixture(scope="module")
def small_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's directory with small sizes and no weights."""
    directory = tmp_path_factory.mktemp("small")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded_directory() / name, directory / name)
    config = json.loads((embedded_directory() / "config.json").read_text()) | SMALL
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def config(small_directory: Path) -> ModelConfig:
    return read_model_config(small_directory)


@pytest.fixture(scope="module")
def rows(small_directory: Path) -> data.Rows:
    return data.draw_rows(data.read_chat_frame(small_directory), 2000, seed=0, num_processes=1)


def sharp_network(config: ModelConfig) -> Network:
    """Random weights wide enough that tokens, positions and masks all move the logits."""
    made = Network(config, torch.float32)
    made.initialise(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0 if parameter.dim() == 2 else 1.0)
    return made


def test_prompts_are_framed_as_the_chat_template_says(small_directory: Path) -> None:
    frame = data.read_chat_frame(small_directory)
    header = [256, 259, *b"user", 260, *b"\n\n"]
    assert frame.prompt_ids("Hi") == [*header, *b"Hi", 261, 259, *b"assistant", 260, *b"\n\n"]
    assert frame.end_id == END


def test_rows_hold_prompt_answer_and_ends_of_training_problems_only(rows: data.Rows, small_directory: Path) -> None:
    frame = data.read_chat_frame(small_directory)
    for stored, prompt, answer in zip(rows.bytes_NW, rows.prompt_N, rows.answer_N, strict=True):
        text = bytes(stored[len(frame.before) : prompt - len(frame.after)])
        ends = stored[prompt + answer - 1 :]
        assert not is_held_out(text.decode("ascii"))
        assert (ends == END - data.SPECIAL_OFFSET).all()
        assert (stored[prompt : prompt + answer - 1] < 128).all()


@given(seed=st.integers(0, 2**31), shape=st.sampled_from(SHAPES))
@settings(max_examples=25, deadline=None)
def test_masks_never_touch_a_prompt_and_only_masks_are_predicted(
    rows: data.Rows, config: ModelConfig, seed: int, shape: int
) -> None:
    sampler = Sampler(rows, config, CPU, seed)
    batch = sampler.draw(shape, 64, torch.ones(len(data.TASK_NAMES)))
    token_BX, is_masked_BX = batch.streams.token_BX, batch.streams.token_BX == MASK
    header = [259, *b"assistant", 260, *b"\n\n"]
    for row, masked in zip(batch.target_BX.tolist(), is_masked_BX[:, :shape].tolist(), strict=True):
        start = row.index(261) + 1 + len(header)
        assert row[start - len(header) : start] == header
        assert not any(masked[:start])
    assert torch.equal(token_BX[~is_masked_BX], batch.target_BX[~is_masked_BX])
    assert torch.equal(batch.weight_BX > 0, is_masked_BX)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_the_stream_repeats_its_block_of_the_canvas_which_is_masked_there(
    rows: data.Rows, config: ModelConfig, seed: int
) -> None:
    shape = SHAPES[0]
    batch = Sampler(rows, config, CPU, seed).draw(shape, 64, torch.ones(len(data.TASK_NAMES)))
    sees_BX, position_BX = batch.streams.stream_sees_BX, batch.streams.position_BX
    assert sees_BX is not None
    assert sees_BX[:, shape:].any()
    for sees, positions, target, token in zip(
        sees_BX, position_BX, batch.target_BX, batch.streams.token_BX, strict=True
    ):
        block = positions[shape:][sees[shape:]]
        assert torch.equal(block, (~sees[:shape]).nonzero().squeeze(1))
        assert torch.equal(target[shape:][sees[shape:]], target[block])
        assert (token[:shape][block] == MASK).all()


class Served:
    """dbench's own model on one slot, reading the weights of a directory in float32."""

    def __init__(self, directory: Path, prompt: list[int], num_masks: int) -> None:
        config = read_model_config(directory)
        weights = load_weights(config, WeightSource(directory, "auto", torch.float32, CPU, 0))
        self.table = SlotTable(SlotSizes(1, 96, BLOCK, 16, MASK, CPU))
        self._model = Model(config, weights, SdpaBackend())
        self._kv = KvPool(config, num_pages=6, page_size=16, like=weights.embedding_VE)
        task = BlockTask(
            key=BlockKey("request", 0, 0),
            token_ids=tuple(prompt),
            num_masks=num_masks,
            block_length=BLOCK,
            sampling=SamplingParameters(),
            request_seed=0,
            ignore_eos=False,
            arrival_s=0.0,
            num_remaining_blocks=num_masks // BLOCK,
        )
        self.table.fill(0, task, tuple(range(6)))
        self._canvas_length = task.canvas_length
        self._block_start = task.block_start

    @torch.inference_mode()
    def logits(self, phase: Phase) -> Tensor:
        """Of the masked positions of the block, in order."""
        whole = (0, self._canvas_length) if phase is Phase.REFRESH else (self._block_start, BLOCK)
        batch = pack(self.table, [Span(0, phase, *whole)], 0)
        return self._model.logits(self._model.forward(batch, self._kv))

    def fix(self, offsets: list[int], tokens: list[int]) -> None:
        chosen_BL = torch.zeros(1, BLOCK, dtype=torch.bool)
        token_BL = torch.zeros(1, BLOCK, dtype=torch.int64)
        chosen_BL[0, offsets], token_BL[0, offsets] = True, torch.tensor(tokens)
        self.table.land(torch.tensor([0]), chosen_BL, token_BL, torch.tensor([END]))


def test_the_saved_network_computes_what_dbench_serves(
    config: ModelConfig, small_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(small_directory, tmp_path / "model")
    trained = sharp_network(config)
    network.save_weights(trained, tmp_path / "model" / "model.safetensors")
    network.load_weights(trained, tmp_path / "model" / "model.safetensors")
    prompt, num_masks = list(b"What is 5 + 7?"), 2 * BLOCK
    served = Served(tmp_path / "model", prompt, num_masks)
    length, start = len(prompt) + num_masks, len(prompt)
    canvas = torch.tensor([prompt + [MASK] * num_masks])
    position = torch.arange(length).unsqueeze(0)
    refreshed = trained(Streams(canvas, position, length, None, None))[0, start : start + BLOCK]
    torch.testing.assert_close(served.logits(Phase.REFRESH), refreshed, atol=1e-4, rtol=1e-4)

    served.fix([0, 3], [49, 50])
    block = torch.tensor([[49, MASK, MASK, 50, *[MASK] * (BLOCK - 4)]])
    place = position[:, start : start + BLOCK]
    sees = torch.cat((~((position >= start) & (position < start + BLOCK)), torch.ones_like(block, dtype=torch.bool)), 1)
    later = Streams(torch.cat((canvas, block), 1), torch.cat((position, place), 1), length, sees, None)
    stream = trained(later)[0, length:][block[0] == MASK]
    torch.testing.assert_close(served.logits(Phase.DECODE), stream, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(stream[0], refreshed[1], atol=1e-2)


def test_padding_does_not_change_an_answer(config: ModelConfig, small_directory: Path) -> None:
    frame = data.read_chat_frame(small_directory)
    problems = [
        Problem("copy", "Say this and nothing else: owl 4 pen", "owl 4 pen"),
        Problem("addition", "Add 1 and 2.", "3"),
    ]
    trained = sharp_network(config)
    for kept_keys in (True, False):
        chosen = DecodeSettings(gen_length=16, block_length=BLOCK, threshold=0.1, kept_keys=kept_keys)
        together = answer_all(trained, frame, problems, chosen)
        assert together == answer_all(trained, frame, problems, replace(chosen, batch_size=1))
        assert all(1 <= answer.num_passes <= 16 for answer in together)


def test_a_short_run_learns_something_and_leaves_a_model_that_loads(
    small_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, object] = {
        "steps": 100,
        "batch": 4,
        "rate": 1e-2,
        "warmup-steps": 10,
        "problems": 500,
        "processes": 1,
    }
    options |= {"report-every": 60, "report-problems": 7, "final-problems": 7, "device": "cpu"}
    words = [f"--{name}={value}" for name, value in options.items()]
    out = tmp_path / "trained"
    monkeypatch.setattr(sys, "argv", ["train_embedded", f"--config={small_directory}", f"--out={out}", *words])
    train_embedded.main()
    report = json.loads((out / "training.json").read_text())
    losses = [point["loss"] for point in report["loss_curve"]]
    assert losses[-1] < 0.9 * losses[0]
    assert [evaluation["step"] for evaluation in report["evaluations"]] == [60, 100]
    assert report["step"] == 100
    assert sum(report["training_problems"].values()) == 500
    assert report["final"]["float32, exact cache"]["all"]["num_problems"] == len(held_out(0, 7))
    config = read_model_config(out)
    load_weights(config, WeightSource(out, "auto", torch.float32, CPU, 0))


@pytest.mark.parametrize("words", [["--steps=0"], ["--problems=0"], ["--batch=-1"], ["--final-problems=0"]])
def test_a_count_of_nothing_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_embedded", "--out=nowhere", *words])
    with pytest.raises(SystemExit):
        train_embedded.main()
    assert "wanted a whole number at least 1" in capsys.readouterr().err


def test_weights_of_another_model_or_none_are_refused(config: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ModelError, match=r"model\.safetensors: no weights that can be read"):
        network.load_weights(sharp_network(config), path)
    network.save_weights(sharp_network(replace(config, n_layers=config.n_layers + 1)), path)
    with pytest.raises(ModelError, match="names or shapes of tensors are not those of the model"):
        network.load_weights(sharp_network(config), path)


def test_a_directory_without_a_chat_template_trains_nothing(small_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(small_directory, tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="training needs a chat template and an eos_token"):
        data.read_chat_frame(tmp_path / "plain")


def test_all_shapes_of_a_step_hold_the_same_number_of_tokens() -> None:
    tokens = tokens_per_step(train_embedded.DEFAULT_BATCH)
    assert all(tokens % (shape + STREAM) == 0 for shape in SHAPES)
