"""Small random checkpoints in the real layout: config.json, safetensors shards and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY = 64
MASK, EOS = 60, 61

TINY = {
    "architectures": ["LLaDAModelLM"],
    "activation_type": "silu",
    "block_type": "llama",
    "d_model": 32,
    "embedding_size": VOCABULARY,
    "eos_token_id": EOS,
    "include_bias": False,
    "init_std": 0.3,
    "mask_token_id": MASK,
    "max_sequence_length": 512,
    "mlp_hidden_size": 48,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 3,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "weight_tying": False,
}


def tiny_tensors(seed: int = 0, *, n_kv_heads: int = 4, std: float = 0.3) -> dict[str, Tensor]:
    """Every tensor of a TINY checkpoint; norm weights near 1 but not 1, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(seed)
    width, hidden, head_dim = 32, 48, 8

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    def norm() -> Tensor:
        return 1.0 + 0.2 * torch.randn(width, generator=generator)

    tensors = {
        "model.transformer.wte.weight": draw(VOCABULARY, width),
        "model.transformer.ln_f.weight": norm(),
        "model.transformer.ff_out.weight": 4 * draw(VOCABULARY, width),
    }
    for layer in range(3):
        prefix = f"model.transformer.blocks.{layer}."
        tensors |= {
            f"{prefix}attn_norm.weight": norm(),
            f"{prefix}q_proj.weight": draw(width, width),
            f"{prefix}k_proj.weight": draw(n_kv_heads * head_dim, width),
            f"{prefix}v_proj.weight": draw(n_kv_heads * head_dim, width),
            f"{prefix}attn_out.weight": draw(width, width),
            f"{prefix}ff_norm.weight": norm(),
            f"{prefix}ff_proj.weight": draw(hidden, width),
            f"{prefix}up_proj.weight": draw(hidden, width),
            f"{prefix}ff_out.weight": draw(width, hidden),
        }
    return tensors


def write_checkpoint(directory: Path, tensors: Mapping[str, Tensor], num_shards: int = 2, **changes: object) -> Path:
    """Config, shards and index; a single shard goes without an index, as model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TINY, **changes}))
    if num_shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
