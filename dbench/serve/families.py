"""Model families: what a checkpoint's architecture name says about keys, tensors, biases and ids.

A new family is one entry of FAMILIES. Sizes always come from the checkpoint's own config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbench.errors import ModelError, unknown_name
from dbench.models import embedded_directory, size_directory, size_names
from dbench.serve.tokenizer_files import read_json_object, special_tokens

EMBEDDED = "embedded"
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
    usable_length: int | None = None
    """Longest canvas that the authors vouch for, where that is less than the context limit."""


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
    "dream": Family(
        architecture="DreamModel",
        keys={
            "d_model": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "n_kv_heads": "num_key_value_heads",
            "mlp_hidden_size": "intermediate_size",
            "vocab_size": "vocab_size",
            "rope_theta": "rope_theta",
            "rms_norm_eps": "rms_norm_eps",
            "max_sequence_length": "max_position_embeddings",
        },
        init_std_key="initializer_range",
        switches={
            "hidden_act": "silu",
            "mlp_bias": False,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        tensors=TensorNames(
            embedding="model.embed_tokens",
            final_norm="model.norm",
            lm_head="lm_head",
            layer="model.layers.{layer}.",
            attn_norm="input_layernorm",
            q="self_attn.q_proj",
            k="self_attn.k_proj",
            v="self_attn.v_proj",
            attn_out="self_attn.o_proj",
            mlp_norm="post_attention_layernorm",
            gate="mlp.gate_proj",
            up="mlp.up_proj",
            mlp_out="mlp.down_proj",
        ),
        has_qkv_bias=True,
        logit_shift=1,
        end_of_turn="<|im_end|>",
        usable_length=2048,
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
    init_std: float
    """Standard deviation of random weights."""

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V of one position over all layers, with elements of `element_size` bytes."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * element_size

    @property
    def usable_length(self) -> int:
        """Longest canvas that the model's authors vouch for."""
        limit = FAMILIES[self.family].usable_length
        return self.max_sequence_length if limit is None else min(limit, self.max_sequence_length)


def is_named_size(name: str) -> bool:
    """A model of known shapes that dbench has no weights and no tokenizer of."""
    return name in size_names()


def is_built_in(name: str) -> bool:
    """A name that means the same on every machine, not a path."""
    return name == EMBEDDED or is_named_size(name)


def directory_of(name: str) -> Path:
    """Where the files of a model or tokenizer name are looked for: a path, 'embedded' or a named size."""
    if name == EMBEDDED:
        return embedded_directory()
    return size_directory(name) if is_named_size(name) else Path(name).expanduser()


def find_model(name: str) -> Path:
    """The directory of a model; raises ModelError when there is none with a config.json."""
    directory = directory_of(name)
    if not directory.is_dir():
        is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
        hint = (
            f"dbench does not download: fetch it first (hf download {name} --local-dir DIR) and pass DIR"
            if is_hub_name
            else f"pass a directory in Hugging Face layout, {EMBEDDED!r} or a size ({', '.join(size_names())})"
        )
        raise ModelError(f"model {name!r}: no such directory; {hint}")
    if not (directory / "config.json").is_file():
        raise ModelError(f"model {name!r}: {directory} holds no config.json; pass a directory in Hugging Face layout")
    return directory


def find_tokenizer(name: str) -> Path:
    """The directory of a tokenizer name; raises ModelError for a named size, which has none."""
    if is_named_size(name):
        raise ModelError(
            f"{name!r} is a size without a tokenizer; give the prompt as token ids (--prompt-ids), "
            "or a directory that holds a tokenizer (--tokenizer)"
        )
    return directory_of(name)


def read_model_config(directory: Path) -> ModelConfig:
    """Sizes and ids from config.json, and special ids from the tokenizer's files, where there are any."""
    path = directory / "config.json"
    values = read_json_object(path)
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
    n_kv_heads, vocab_size = reader.size(keys["n_kv_heads"]), reader.size(keys["vocab_size"])
    n_heads, head_dim = reader.size(keys["n_heads"]), _head_dim(reader, keys)
    if n_heads % n_kv_heads or head_dim % 2:
        raise ModelError(
            f"{path}: {n_heads} heads of {head_dim} dimensions and {n_kv_heads} KV heads do not fit together: "
            "dimensions per head must be even, heads per KV head whole"
        )
    special = {text: token for text, token in special_tokens(directory).items() if token < vocab_size}
    eos = reader.ids("eos_token_id", vocab_size)
    if family.end_of_turn in special:
        eos |= {special[family.end_of_turn]}
    mask = reader.ids("mask_token_id", vocab_size)
    edges = reader.ids("bos_token_id", vocab_size) | reader.ids("pad_token_id", vocab_size)
    return ModelConfig(
        family=name,
        d_model=reader.size(keys["d_model"]),
        n_layers=reader.size(keys["n_layers"]),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        mlp_hidden_size=reader.size(keys["mlp_hidden_size"]),
        vocab_size=vocab_size,
        rope_theta=reader.number(keys["rope_theta"]),
        rms_norm_eps=reader.number(keys["rms_norm_eps"]),
        max_sequence_length=reader.size(keys["max_sequence_length"]),
        mask_token_id=min(mask, default=None),
        eos_token_ids=tuple(sorted(eos)),
        reserved_token_ids=tuple(sorted(eos | mask | edges | set(special.values()))),
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


def _head_dim(reader: _Reader, keys: Mapping[str, str]) -> int:
    """As the config says, else the width shared by the heads."""
    if reader.values.get("head_dim") is not None:
        return reader.size("head_dim")
    d_model, n_heads = reader.size(keys["d_model"]), reader.size(keys["n_heads"])
    if d_model % n_heads:
        raise ModelError(f"{reader.path}: {d_model} dimensions do not fit {n_heads} heads: wanted a whole number each")
    return d_model // n_heads


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
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelError(f"{self.path}: {key} is {value!r}, wanted a positive number")
        return float(value)

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
