"""Reading a model directory: sizes, ids, and one clear line for everything that is odd."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dbench.errors import ModelError
from dbench.models import size_names
from dbench.options import EngineOptions, options_of
from dbench.serve.deployment import deployment_of
from dbench.serve.families import FAMILIES, find_model, find_tokenizer, is_built_in, is_named_size, read_model_config
from tests.serve.server_builders import options

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


DREAM_7B = {
    "architectures": ["DreamModel"],
    "bos_token_id": 151665,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "model_type": "Dream",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151643,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
PUBLISHED: dict[str, dict[str, object]] = {"llada": LLADA_8B, "dream": DREAM_7B}


def write_model(
    directory: Path, *, base: dict[str, object] = PUBLISHED["llada"], without: str = "", **changes: object
) -> Path:
    values = {key: value for key, value in {**base, **changes}.items() if key != without}
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


def test_end_of_turn_ends_an_answer_and_special_tokens_are_reserved(tmp_path: Path) -> None:
    write_tokens(tmp_path, eot_id=126348, startoftext=126080)
    config = read_model_config(write_model(tmp_path))
    assert config.eos_token_ids == (126081, 126348)
    assert config.reserved_token_ids == (126080, 126081, 126336, 126348)


def test_without_a_tokenizer_the_ids_of_the_config_remain(tmp_path: Path) -> None:
    config = read_model_config(write_model(tmp_path, eos_token_id=[5, 3]))
    assert config.eos_token_ids == (3, 5)
    assert config.reserved_token_ids == (3, 5, 126081, 126336)


def test_the_published_dream_sizes_are_read(tmp_path: Path) -> None:
    config = read_model_config(write_model(tmp_path, base=DREAM_7B))
    assert (config.family, config.head_dim, config.n_kv_heads) == ("dream", 128, 4)
    assert config.kv_bytes_per_token(2) == 57_344
    assert (config.mask_token_id, config.init_std) == (151666, 0.02)
    assert FAMILIES["dream"].logit_shift == 1


def test_authors_vouch_for_less_than_the_context_limit(tmp_path: Path) -> None:
    long, short = (
        read_model_config(write_model(tmp_path, base=DREAM_7B, max_position_embeddings=limit))
        for limit in (131072, 1024)
    )
    assert (long.max_sequence_length, long.usable_length) == (131072, 2048)
    assert short.usable_length == 1024
    assert read_model_config(write_model(tmp_path)).usable_length == 4096


def test_special_tokens_come_from_the_tokenizer_s_config_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    tokens = {"151645": ("<|im_end|>", True), "151657": ("<tool_call>", False), "152064": ("<|beyond|>", True)}
    decoder = {number: {"content": text, "special": special} for number, (text, special) in tokens.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    config = read_model_config(write_model(tmp_path, base=DREAM_7B))
    assert config.eos_token_ids == (151643, 151645)
    assert config.reserved_token_ids == (151643, 151645, 151665, 151666)


@pytest.mark.parametrize("text", ['{"added_tokens": 3}', '{"added_tokens": [{"id": 5}]}', '{"added_tokens": ["<s>"]}'])
def test_an_odd_list_of_special_tokens_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json: odd list of added tokens"):
        read_model_config(write_model(tmp_path))


def test_the_width_of_a_head_may_stand_in_the_config(tmp_path: Path) -> None:
    assert read_model_config(write_model(tmp_path, base=DREAM_7B, head_dim=64)).head_dim == 64


@pytest.mark.parametrize(
    ("family", "key"),
    [
        (name, key)
        for name, family in FAMILIES.items()
        for key in (*family.keys.values(), "eos_token_id", "architectures")
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, family: str, key: str) -> None:
    with pytest.raises(ModelError, match=key):
        read_model_config(write_model(tmp_path, base=PUBLISHED[family], without=key))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_a_mask_id_is_read(tmp_path: Path, family: str) -> None:
    directory = write_model(tmp_path, base=PUBLISHED[family], without="mask_token_id")
    assert read_model_config(directory).mask_token_id is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", True),
        ("use_sliding_window", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "yarn"}),
    ],
)
def test_what_dream_models_are_not_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"{key} is .*, only .* is supported for DreamModel"):
        read_model_config(write_model(tmp_path, base=DREAM_7B, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("n_layers", "32", "n_layers is '32'"),
        ("n_layers", 0, "n_layers is 0"),
        ("n_layers", True, "n_layers is True"),
        ("rope_theta", -1.0, "rope_theta is -1.0"),
        ("rope_theta", math.inf, "rope_theta is inf"),
        ("weight_tying", True, "weight_tying is True, only False"),
        ("eos_token_id", 126464, "eos_token_id is 126464"),
        ("mask_token_id", -1, "mask_token_id is -1"),
        ("n_kv_heads", 5, "5 KV heads do not fit"),
        ("d_model", 4100, "4100 dimensions do not fit 32 heads"),
        ("d_model", 32 * 127, "32 heads of 127 dimensions"),
        ("head_dim", "128", "head_dim is '128'"),
        ("architectures", ["GPT2LMHeadModel"], r"unknown architecture 'GPT2LMHeadModel' .*LLaDAModelLM"),
        ("architectures", "LLaDAModelLM", "wanted a list"),
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
    assert (config.mask_token_id, config.eos_token_ids) == (258, (257, 261))
    assert config.reserved_token_ids == tuple(range(256, 264))


def test_a_directory_is_a_model_name(tmp_path: Path) -> None:
    assert find_model(str(write_model(tmp_path))) == tmp_path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", "hf download GSAI-ML/LLaDA-8B-Instruct"),
        ("./nowhere", r"'embedded' or a size \(dream-7b, dream-tiny, llada-8b, llada-tiny\)"),
        ("embeded", "'embedded' or a size"),
    ],
)
def test_a_missing_directory_says_what_to_do(name: str, hint: str) -> None:
    with pytest.raises(ModelError, match=hint):
        find_model(name)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_named_sizes_of_a_family_have_the_published_one_among_them(family: str) -> None:
    (published,) = [name for name in size_names() if name.startswith(family) and "tiny" not in name]
    values = json.loads((find_model(published) / "config.json").read_text())
    assert {key: values[key] for key in values.keys() & PUBLISHED[family].keys()} == {
        key: value for key, value in PUBLISHED[family].items() if key in values
    }


@pytest.mark.parametrize("name", size_names())
def test_a_named_size_knows_its_ids_and_has_no_tokenizer(name: str) -> None:
    config = read_model_config(find_model(name))
    assert config.mask_token_id in config.reserved_token_ids
    assert len(config.eos_token_ids) == 2
    assert set(config.eos_token_ids) < set(config.reserved_token_ids)
    assert (is_named_size(name), is_built_in(name)) == (True, True)
    with pytest.raises(ModelError, match=f"'{name}' is a size without a tokenizer; give the prompt as token ids"):
        find_tokenizer(name)


def test_the_option_lists_the_named_sizes() -> None:
    (option,) = [option for option in options_of(EngineOptions) if option.name == "load_format"]
    assert all(name in option.spec.help for name in size_names())


@pytest.mark.parametrize(("name", "shift"), [("llada-tiny", 0), ("dream-tiny", 1)])
def test_a_deployment_tells_its_engines_the_shift_of_the_family(name: str, shift: int) -> None:
    engine, _, _ = options(model=name, load_format="random")
    assert deployment_of(engine).engine_limits().logit_shift == shift
