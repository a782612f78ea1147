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


TINY_DREAM = {
    "architectures": ["DreamModel"],
    "eos_token_id": EOS,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.3,
    "intermediate_size": 48,
    "mask_token_id": MASK,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}


LLADA_NAMES = {
    "embedding": "model.transformer.wte",
    "final_norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "layer": "model.transformer.blocks.",
    "attn_norm": "attn_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "attn_out": "attn_out",
    "mlp_norm": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}

DREAM_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "layer": "model.layers.",
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def tiny_tensors(
    seed: int = 0,
    *,
    n_kv_heads: int = 4,
    std: float = 0.3,
    vocabulary: int = VOCABULARY,
    names: Mapping[str, str] = LLADA_NAMES,
) -> dict[str, Tensor]:
    """Every tensor of a TINY checkpoint; norm weights near 1 but not 1, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(seed)
    width, hidden, head_dim = 32, 48, 8

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    def norm() -> Tensor:
        return 1.0 + 0.2 * torch.randn(width, generator=generator)

    tensors = {
        f"{names['embedding']}.weight": draw(vocabulary, width),
        f"{names['final_norm']}.weight": norm(),
        f"{names['lm_head']}.weight": 4 * draw(vocabulary, width),
    }
    for layer in range(3):
        parts = {
            "attn_norm": norm(),
            "q": draw(width, width),
            "k": draw(n_kv_heads * head_dim, width),
            "v": draw(n_kv_heads * head_dim, width),
            "attn_out": draw(width, width),
            "mlp_norm": norm(),
            "gate": draw(hidden, width),
            "up": draw(hidden, width),
            "down": draw(width, hidden),
        }
        tensors |= {f"{names['layer']}{layer}.{names[part]}.weight": tensor for part, tensor in parts.items()}
    return tensors


def tiny_dream_tensors(seed: int = 0, *, std: float = 0.3, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Every tensor of a TINY_DREAM checkpoint: two KV heads, and biases of query, key and value."""
    tensors = tiny_tensors(seed, n_kv_heads=2, std=std, vocabulary=vocabulary, names=DREAM_NAMES)
    generator = torch.Generator().manual_seed(seed + 1000)
    for layer in range(3):
        for part, rows in (("q", 32), ("k", 16), ("v", 16)):
            name = f"{DREAM_NAMES['layer']}{layer}.{DREAM_NAMES[part]}.bias"
            tensors[name] = 0.5 * torch.randn(rows, generator=generator)
    return tensors


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    num_shards: int = 2,
    *,
    config: Mapping[str, object] = TINY,
    **changes: object,
) -> Path:
    """Config, shards and index; a single shard goes without an index, as model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
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


def prefer_mask(tensors: dict[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The same model, but at every position, whatever the prompt, the mask id has by far the largest logit.

    Dimension 0 is made large and positive in every embedding, stays so through the layers, and only the mask's row
    of the LM head looks at it.
    """
    embedding, head, norm = (f"{names[part]}.weight" for part in ("embedding", "lm_head", "final_norm"))
    changed = dict(tensors) | {name: tensors[name].clone() for name in (embedding, head)}
    assert float(tensors[norm][0]) > 0
    changed[embedding][:, 0] = 50.0
    changed[head][:, 0] = 0.0
    changed[head][MASK] = 0.0
    changed[head][MASK, 0] = 100.0
    return changed
