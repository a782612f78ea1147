"""Model families: what a checkpoint's architecture name says about keys, tensors, biases and ids.

A new family is one entry of FAMILIES. Sizes always come from the checkpoint's own config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbench.errors import ModelError, unknown_name
from dbench.models import embedded_directory

EMBEDDED = "embedded"
RANDOM_WEIGHTS_KEY = "dbench_random_weights"
DEFAULT_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a checkpoint keeps each matrix; `layer` is a prefix with {layer} for the layer's number.

    Names without their last part `.weight` or `.bias`.
    """

    embedding: str
    final_norm: str
    lm_head: str
    layer: str
    attn_norm: str
    q: str
    k: str
    v: str
    attn_out: str
    mlp_norm: str
    gate: str
    up: str
    mlp_out: str


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of one architecture are read and computed."""

    architecture: str
    keys: Mapping[str, str]
    """ModelConfig field -> key of config.json; all are required."""
    init_std_key: str
    """Standard deviation of random weights; DEFAULT_INIT_STD where a config lacks it."""
    switches: Mapping[str, object]
    """Keys of config.json that change the arithmetic -> the only value that is computed here."""
    tensors: TensorNames
    has_qkv_bias: bool
    logit_shift: int
    """The prediction for position i is read at row i - logit_shift."""
    end_of_turn: str
    """The token that ends an answer beside eos_token_id."""


FAMILIES: dict[str, Family] = {
    "llada": Family(
        architecture="LLaDAModelLM",
        keys={
            "d_model": "d_model",
            "n_layers": "n_layers",
            "n_heads": "n_heads",
            "n_kv_heads": "n_kv_heads",
            "mlp_hidden_size": "mlp_hidden_size",
            "vocab_size": "embedding_size",
            "rope_theta": "rope_theta",
            "rms_norm_eps": "rms_norm_eps",
            "max_sequence_length": "max_sequence_length",
        },
        init_std_key="init_std",
        switches={
            "activation_type": "silu",
            "alibi": False,
            "attention_layer_norm": False,
            "block_type": "llama",
            "include_bias": False,
            "include_qkv_bias": False,
            "input_emb_norm": False,
            "layer_norm_type": "rms",
            "rope": True,
            "scale_logits": False,
            "weight_tying": False,
        },
        tensors=TensorNames(
            embedding="model.transformer.wte",
            final_norm="model.transformer.ln_f",
            lm_head="model.transformer.ff_out",
            layer="model.transformer.blocks.{layer}.",
            attn_norm="attn_norm",
            q="q_proj",
            k="k_proj",
            v="v_proj",
            attn_out="attn_out",
            mlp_norm="ff_norm",
            gate="ff_proj",
            up="up_proj",
            mlp_out="ff_out",
        ),
        has_qkv_bias=False,
        logit_shift=0,
        end_of_turn="<|eot_id|>",
    ),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and ids of one checkpoint."""

    family: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_hidden_size: int
    vocab_size: int
    """Rows of the embedding and of the LM head."""
    rope_theta: float
    rms_norm_eps: float
    max_sequence_length: int
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Ids that end an answer: end of text and end of turn."""
    reserved_token_ids: tuple[int, ...]
    """Special ids, ascending: never drawn as random prompt ids."""
    has_random_weights: bool
    """The directory says of itself that it holds no weights and wants seeded random ones."""
    init_std: float
    """Standard deviation of random weights."""

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V of one position over all layers, with elements of `element_size` bytes."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * element_size


def directory_of(name: str) -> Path:
    """Where the files of a model or tokenizer name are looked for: a path, or 'embedded'."""
    return embedded_directory() if name == EMBEDDED else Path(name).expanduser()


def find_model(name: str) -> Path:
    """The directory of a model; raises ModelError when there is none with a config.json."""
    directory = directory_of(name)
    if not directory.is_dir():
        is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
        hint = (
            f"dbench does not download: fetch it first (hf download {name} --local-dir DIR) and pass DIR"
            if is_hub_name
            else f"pass a directory in Hugging Face layout or {EMBEDDED!r}"
        )
        raise ModelError(f"model {name!r}: no such directory; {hint}")
    if not (directory / "config.json").is_file():
        raise ModelError(f"model {name!r}: {directory} holds no config.json; pass a directory in Hugging Face layout")
    return directory


def read_model_config(directory: Path) -> ModelConfig:
    """Sizes and ids from config.json and tokenizer.json (for the special ids, where there is one)."""
    path = directory / "config.json"
    values = _read_json_object(path)
    name = _family_name(path, values)
    family = FAMILIES[name]
    for key, wanted in family.switches.items():
        if key in values and values[key] != wanted:
            raise ModelError(
                f"{path}: {key} is {values[key]!r}, only {wanted!r} is supported for {family.architecture}"
            )
    missing = [key for key in (*family.keys.values(), "eos_token_id") if values.get(key) is None]
    if missing:
        raise ModelError(f"{path}: missing {', '.join(missing)}; copy config.json from the checkpoint's release")
    reader = _Reader(path, values)
    keys = family.keys
    d_model, n_heads = reader.size(keys["d_model"]), reader.size(keys["n_heads"])
    n_kv_heads, vocab_size = reader.size(keys["n_kv_heads"]), reader.size(keys["vocab_size"])
    if d_model % (2 * n_heads) or n_heads % n_kv_heads:
        raise ModelError(
            f"{path}: {d_model} dimensions, {n_heads} heads and {n_kv_heads} KV heads do not fit together: "
            "dimensions per head must be even, heads per KV head whole"
        )
    special = _special_tokens(directory / "tokenizer.json")
    eos = reader.ids("eos_token_id", vocab_size)
    if family.end_of_turn in special:
        eos |= {special[family.end_of_turn]}
    mask = reader.ids("mask_token_id", vocab_size)
    edges = reader.ids("bos_token_id", vocab_size) | reader.ids("pad_token_id", vocab_size)
    return ModelConfig(
        family=name,
        d_model=d_model,
        n_layers=reader.size(keys["n_layers"]),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=d_model // n_heads,
        mlp_hidden_size=reader.size(keys["mlp_hidden_size"]),
        vocab_size=vocab_size,
        rope_theta=reader.number(keys["rope_theta"]),
        rms_norm_eps=reader.number(keys["rms_norm_eps"]),
        max_sequence_length=reader.size(keys["max_sequence_length"]),
        mask_token_id=min(mask, default=None),
        eos_token_ids=tuple(sorted(eos)),
        reserved_token_ids=tuple(
            sorted(eos | mask | edges | {token for token in special.values() if token < vocab_size})
        ),
        has_random_weights=reader.flag(RANDOM_WEIGHTS_KEY),
        init_std=reader.number(family.init_std_key) if family.init_std_key in values else DEFAULT_INIT_STD,
    )


def _family_name(path: Path, values: Mapping[str, Any]) -> str:
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ModelError(f"{path}: architectures is {architectures!r}, wanted a list of one name")
    for name, family in FAMILIES.items():
        if family.architecture == architectures[0]:
            return name
    known = (family.architecture for family in FAMILIES.values())
    raise ModelError(f"{path}: {unknown_name('architecture', str(architectures[0]), known)}")


def _special_tokens(path: Path) -> dict[str, int]:
    """Text -> id of the special tokens of a tokenizer.json; none when the file is not there."""
    if not path.is_file():
        return {}
    tokens = _read_json_object(path).get("added_tokens", [])
    return {token["content"]: token["id"] for token in tokens if token.get("special")}


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: holds a {type(values).__name__}, wanted a JSON object")
    return values


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checked access to the values of one config.json."""

    path: Path
    values: Mapping[str, Any]

    def size(self, key: str) -> int:
        value = self.values[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.path}: {key} is {value!r}, wanted a positive integer")
        return value

    def number(self, key: str) -> float:
        value = self.values[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelError(f"{self.path}: {key} is {value!r}, wanted a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key} is {value!r}, wanted true or false")
        return value

    def ids(self, key: str, vocab_size: int) -> set[int]:
        """The id or list of ids under `key`; empty when it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return set()
        found = value if isinstance(value, list) else [value]
        for token in found:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise ModelError(f"{self.path}: {key} is {value!r}, wanted ids from 0 to {vocab_size - 1}")
        return set(found)
