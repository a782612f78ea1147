"""Reading a model directory: sizes, ids, and one clear line for everything that is odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dbench.errors import ModelError
from dbench.serve.families import FAMILIES, find_model, read_model_config

LLADA_8B = {
    "architectures": ["LLaDAModelLM"],
    "activation_type": "silu",
    "block_type": "llama",
    "d_model": 4096,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "include_bias": False,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 126464,
    "weight_tying": False,
}


def write_model(directory: Path, *, without: str = "", **changes: object) -> Path:
    values = {key: value for key, value in {**LLADA_8B, **changes}.items() if key != without}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def write_tokens(directory: Path, **ids: int) -> None:
    tokens = [{"id": token, "content": f"<|{name}|>", "special": True} for name, token in ids.items()]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))


def test_the_published_llada_sizes_are_read(tmp_path: Path) -> None:
    config = read_model_config(write_model(tmp_path))
    assert (config.family, config.head_dim, config.vocab_size) == ("llada", 128, 126464)
    assert config.kv_bytes_per_token(2) == 524_288
    assert config.mask_token_id == 126336
    assert not config.has_random_weights


def test_end_of_turn_ends_an_answer_and_special_tokens_are_reserved(tmp_path: Path) -> None:
    write_tokens(tmp_path, eot_id=126348, startoftext=126080)
    config = read_model_config(write_model(tmp_path))
    assert config.eos_token_ids == (126081, 126348)
    assert config.reserved_token_ids == (126080, 126081, 126336, 126348)


def test_without_a_tokenizer_the_ids_of_the_config_remain(tmp_path: Path) -> None:
    config = read_model_config(write_model(tmp_path, eos_token_id=[5, 3]))
    assert config.eos_token_ids == (3, 5)
    assert config.reserved_token_ids == (3, 5, 126081, 126336)


@pytest.mark.parametrize("key", [*FAMILIES["llada"].keys.values(), "eos_token_id", "architectures"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelError, match=key):
        read_model_config(write_model(tmp_path, without=key))


def test_a_model_without_a_mask_id_is_read(tmp_path: Path) -> None:
    assert read_model_config(write_model(tmp_path, without="mask_token_id")).mask_token_id is None


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("n_layers", "32", "n_layers is '32'"),
        ("n_layers", 0, "n_layers is 0"),
        ("n_layers", True, "n_layers is True"),
        ("rope_theta", -1.0, "rope_theta is -1.0"),
        ("weight_tying", True, "weight_tying is True, only False"),
        ("eos_token_id", 126464, "eos_token_id is 126464"),
        ("mask_token_id", -1, "mask_token_id is -1"),
        ("n_kv_heads", 5, "5 KV heads do not fit"),
        ("d_model", 4100, "4100 dimensions"),
        ("architectures", ["GPT2LMHeadModel"], r"unknown architecture 'GPT2LMHeadModel' .*LLaDAModelLM"),
        ("architectures", "LLaDAModelLM", "wanted a list"),
        ("dbench_random_weights", "yes", "wanted true or false"),
    ],
)
def test_an_odd_value_is_refused_by_name(tmp_path: Path, key: str, value: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_model_config(write_model(tmp_path, **{key: value}))


def test_broken_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        read_model_config(tmp_path)


def test_embedded_is_a_model_name() -> None:
    config = read_model_config(find_model("embedded"))
    assert config.has_random_weights
    assert (config.mask_token_id, config.eos_token_ids) == (258, (257, 261))
    assert config.reserved_token_ids == tuple(range(256, 264))


def test_a_directory_is_a_model_name(tmp_path: Path) -> None:
    assert find_model(str(write_model(tmp_path))) == tmp_path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", "hf download GSAI-ML/LLaDA-8B-Instruct"),
        ("./nowhere", "or 'embedded'"),
        ("embeded", "or 'embedded'"),
    ],
)
def test_a_missing_directory_says_what_to_do(name: str, hint: str) -> None:
    with pytest.raises(ModelError, match=hint):
        find_model(name)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        find_model(str(tmp_path))
