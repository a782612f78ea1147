"""Weights of a model on its device, and how they are filled: from a checkpoint or at random.

Shapes: V vocabulary, E d_model, F = (H + 2 K) x D rows of query, key and value, H heads, K KV heads, D head dim,
M MLP hidden size. Projections that read the same input lie in one matrix (query, key, value; gate, up);
a checkpoint's tensors are copied into slices of it, one at a time, so no second copy of the model exists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dbench.errors import ModelError, unknown_name
from dbench.serve.families import FAMILIES, ModelConfig

LOAD_FORMATS = ("auto", "random")
INDEX_NAME = "model.safetensors.index.json"
NAMES_SHOWN = 4
FLOAT_FORMATS = ("BF16", "F16", "F32")
"""What safetensors calls the number formats that are read."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attn_norm_E: Tensor
    qkv_FE: Tensor
    qkv_bias_F: Tensor | None
    attn_out_EF: Tensor
    mlp_norm_E: Tensor
    gate_up_ME: Tensor
    """2 M rows: gate, then up."""
    mlp_out_EM: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    embedding_VE: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_E: Tensor
    lm_head_VE: Tensor


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Which weights to take, and the form they get."""

    directory: Path
    load_format: str
    """'auto': the checkpoint's own; 'random': normal(0, init_std) from `seed`, norms 1."""
    dtype: torch.dtype
    device: torch.device
    seed: int


def load_weights(config: ModelConfig, source: WeightSource) -> Weights:
    """Filled weights; raises ModelError for tensors that are missing, extra, unreadable or of another shape."""
    if source.load_format not in LOAD_FORMATS:
        raise ModelError(unknown_name("load format", source.load_format, LOAD_FORMATS))
    files = _checkpoint_files(source.directory) if source.load_format == "auto" else []
    if source.load_format == "auto" and not files:
        raise ModelError(
            f"no *.safetensors in {source.directory}; put the checkpoint's weights there, "
            "or take --load-format random for a speed test"
        )
    weights = _allocate(config, source)
    targets = _targets(config, weights)
    if files:
        _fill_from_files(files, targets)
    else:
        _fill_at_random(config, targets, source.seed)
    return weights


def _allocate(config: ModelConfig, source: WeightSource) -> Weights:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=source.dtype, device=source.device)

    width, hidden = config.d_model, config.mlp_hidden_size
    query_rows = config.n_heads * config.head_dim
    qkv_rows = query_rows + 2 * config.n_kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attn_norm_E=empty(width),
            qkv_FE=empty(qkv_rows, width),
            qkv_bias_F=empty(qkv_rows) if FAMILIES[config.family].has_qkv_bias else None,
            attn_out_EF=empty(width, query_rows),
            mlp_norm_E=empty(width),
            gate_up_ME=empty(2 * hidden, width),
            mlp_out_EM=empty(width, hidden),
        )
        for _ in range(config.n_layers)
    )
    vocabulary = config.vocab_size
    return Weights(empty(vocabulary, width), layers, empty(width), empty(vocabulary, width))


def _targets(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Checkpoint name -> the view of `weights` that holds the tensor; together they cover everything once."""
    names = FAMILIES[config.family].tensors
    targets = {
        f"{names.embedding}.weight": weights.embedding_VE,
        f"{names.final_norm}.weight": weights.final_norm_E,
        f"{names.lm_head}.weight": weights.lm_head_VE,
    }
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    for number, layer in enumerate(weights.layers):
        prefix = names.layer.format(layer=number)
        q_FE, k_FE, v_FE = torch.split(layer.qkv_FE, [q_rows, kv_rows, kv_rows])
        gate_ME, up_ME = torch.split(layer.gate_up_ME, config.mlp_hidden_size)
        views = {
            names.attn_norm: layer.attn_norm_E,
            names.q: q_FE,
            names.k: k_FE,
            names.v: v_FE,
            names.attn_out: layer.attn_out_EF,
            names.mlp_norm: layer.mlp_norm_E,
            names.gate: gate_ME,
            names.up: up_ME,
            names.mlp_out: layer.mlp_out_EM,
        }
        targets |= {f"{prefix}{name}.weight": view for name, view in views.items()}
        if layer.qkv_bias_F is not None:
            biases = torch.split(layer.qkv_bias_F, [q_rows, kv_rows, kv_rows])
            targets |= {
                f"{prefix}{name}.bias": view for name, view in zip((names.q, names.k, names.v), biases, strict=True)
            }
    return targets


def _fill_at_random(config: ModelConfig, targets: Mapping[str, Tensor], seed: int) -> None:
    """Norms 1, all else normal(0, init_std), each tensor from a generator of its own, so that order does not matter.

    Drawn on the device, where 8 billion numbers take a second: CPUs and GPUs get different ones from one seed.
    """
    names = FAMILIES[config.family].tensors
    norms = {names.final_norm, names.attn_norm, names.mlp_norm}
    for name, target in targets.items():
        stem = name.removesuffix(".weight")
        if stem in norms or stem.rpartition(".")[2] in norms:
            target.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(target.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        if target.is_cuda:
            target.normal_(0.0, config.init_std, generator=generator)
        else:
            target.copy_(torch.empty(target.shape).normal_(0.0, config.init_std, generator=generator))


def _checkpoint_files(directory: Path) -> list[Path]:
    """The shards that the index names, else every *.safetensors of the directory."""
    index = directory / INDEX_NAME
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: no readable weight_map: {error!r}; download the file again") from error
    if not names:
        raise ModelError(f"{index}: its weight_map names no file; download the file again")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{directory}: shards missing: {_few(missing)}; download them again")
    return [directory / name for name in names]


def _fill_from_files(files: Iterable[Path], targets: Mapping[str, Tensor]) -> None:
    """Check names and shapes of the whole checkpoint, then copy it tensor by tensor."""
    with ExitStack() as stack:
        shards = {}
        for path in files:
            try:
                shards[path] = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: not a safetensors file: {error}; download it again") from error
        found: dict[str, Path] = {}
        directory = next(iter(shards)).parent
        for path, shard in shards.items():
            for name in shard.keys():  # noqa: SIM118
                if name in found:
                    raise ModelError(
                        f"{directory}: {name} is both in {found[name].name} and in {path.name}; leave only one of them"
                    )
                found[name] = path
        for kind, names in (("missing", targets.keys() - found.keys()), ("unknown", found.keys() - targets.keys())):
            if names:
                raise ModelError(f"{directory}: {len(names)} {kind} tensors: {_few(sorted(names))}")
        _check_tensors(directory, {name: shards[path].get_slice(name) for name, path in found.items()}, targets)
        for name, target in targets.items():
            target.copy_(shards[found[name]].get_tensor(name))


def _check_tensors(directory: Path, tensors: Mapping[str, Any], targets: Mapping[str, Tensor]) -> None:
    """Raises ModelError for shapes that are not those of config.json, and for numbers that are no floats."""
    wrong = []
    for name, target in targets.items():
        shape, dtype = tuple(tensors[name].get_shape()), tensors[name].get_dtype()
        if shape != tuple(target.shape):
            wrong.append(f"{name} is {list(shape)}, wanted {list(target.shape)}")
        elif dtype not in FLOAT_FORMATS:
            wrong.append(
                f"{name} is {dtype}, wanted one of {', '.join(FLOAT_FORMATS)} (quantised weights are not read)"
            )
    if wrong:
        raise ModelError(f"{directory}: {len(wrong)} tensors do not fit config.json: {_few(wrong)}")


def _few(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
