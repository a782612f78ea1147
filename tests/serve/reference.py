"""A dense decoder for one sequence, written to be read: what the engine must agree with, id for id.

No pages, no packing, no batches, and nothing shared with dbench but the names of the sampling parameters: it reads
config.json by its own tables, works on whole matrices of one canvas, and chooses in plain Python.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from dbench.serve.sequence import SamplingParameters

WORD = 0xFFFFFFFF


def philox_scalar(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 of one counter, in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & WORD, (a >> 32) ^ c[3] ^ k[1], a & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def draw(seed: int, quarter: int, position: int, step: int, tag: int) -> list[int]:
    return philox_scalar([quarter, position, step, tag], [seed & WORD, (seed >> 32) & WORD])


def noise(seed: int, token: int, position: int, step: int) -> float:
    u = (draw(seed, token // 4, position, step, 0)[token % 4] + 0.5) / 2**32
    return -math.log(-math.log1p(-u))


def noise_of_tokens(seed: int, num_tokens: int, position: int, step: int) -> NDArray[np.float64]:
    """`noise` of the tokens 0 .. num_tokens - 1: ten rounds on all quarters at once, in unsigned 64-bit words."""
    quarters = np.arange(-(-num_tokens // 4), dtype=np.uint64)
    c = [quarters, *(np.full_like(quarters, word) for word in (position, step, 0))]
    k = [seed & WORD, (seed >> 32) & WORD]
    low, half = np.uint64(WORD), np.uint64(32)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> half) ^ c[1] ^ np.uint64(k[0]), b & low, (a >> half) ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    u = (np.stack(c, axis=1).reshape(-1)[:num_tokens].astype(np.float64) + 0.5) / 2**32
    return np.asarray(-np.log(-np.log1p(-u)))


@dataclass(frozen=True)
class Layout:
    """How the checkpoints of one architecture name their sizes and tensors."""

    heads: str
    kv_heads: str
    layers: str
    shift: int
    """The prediction of position i is read at row i - shift; position 0 keeps its own row."""
    embedding: str
    final_norm: str
    lm_head: str
    layer: str
    attn_norm: str
    query: str
    key: str
    value: str
    attn_out: str
    mlp_norm: str
    gate: str
    up: str
    down: str


LAYOUTS = {
    "LLaDAModelLM": Layout(
        heads="n_heads",
        kv_heads="n_kv_heads",
        layers="n_layers",
        shift=0,
        embedding="model.transformer.wte",
        final_norm="model.transformer.ln_f",
        lm_head="model.transformer.ff_out",
        layer="model.transformer.blocks.",
        attn_norm="attn_norm",
        query="q_proj",
        key="k_proj",
        value="v_proj",
        attn_out="attn_out",
        mlp_norm="ff_norm",
        gate="ff_proj",
        up="up_proj",
        down="ff_out",
    ),
    "DreamModel": Layout(
        heads="num_attention_heads",
        kv_heads="num_key_value_heads",
        layers="num_hidden_layers",
        shift=1,
        embedding="model.embed_tokens",
        final_norm="model.norm",
        lm_head="lm_head",
        layer="model.layers.",
        attn_norm="input_layernorm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attn_out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
    ),
}


@dataclass
class Decoded:
    """What one request gave."""

    ids: list[int]
    """Generated ids, cut after the first end-of-text id unless it is ignored."""
    steps_per_block: list[int]


@dataclass
class Caches:
    """K and V of every position, one pair per layer: [length, heads, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class Proposal:
    """What one masked position would become, and how sure that is."""

    token: int
    confidence: float
    entropy: float
    margin: float


class Reference:
    """`recomputes`: every step runs over the whole canvas from nothing.

    Else a block's first step does, and the later ones keep K and V of all positions outside of the block.
    """

    def __init__(self, directory: Path, *, recomputes: bool = False) -> None:
        torch.set_num_threads(1)  # for matrices this small, more threads than free cores are thirty times slower
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.layout = LAYOUTS[self.config["architectures"][0]]
        self.shift = self.layout.shift
        self.recomputes = recomputes
        self.tensors: dict[str, Tensor] = {}
        for shard in sorted(directory.glob("*.safetensors")):
            self.tensors |= {name: tensor.float() for name, tensor in load_file(shard).items()}
        eos = self.config["eos_token_id"]
        self.eos_ids = set(eos if isinstance(eos, list) else [eos])
        self.mask_id = self.config["mask_token_id"]

    def decode(
        self,
        prompt: list[int],
        gen_length: int,
        block_length: int,
        sampling: SamplingParameters,
        seed: int = 0,
        ignore_eos: bool = True,
    ) -> Decoded:
        """All blocks of a request, one sequence on its own."""
        canvas: list[int | None] = [*prompt, *[None] * gen_length]
        steps_per_block = []
        for start in range(len(prompt), len(canvas), block_length):
            block = range(start, start + block_length)
            steps_per_block.append(self._decode_block(canvas, block, sampling.with_defaults(), seed, ignore_eos))
            found = [position for position in block if canvas[position] in self.eos_ids]
            if found and not ignore_eos:
                canvas = canvas[: found[0] + 1]
                break
        ids = canvas[len(prompt) :]
        assert None not in ids
        return Decoded([token for token in ids if token is not None], steps_per_block)

    def logits(self, canvas: list[int | None], rows: range, first_written: int, caches: Caches) -> Tensor:
        """Logits of `rows`. Their K and V, from position `first_written` on, replace what `caches` hold.

        Empty caches are filled; the rows must then be the whole canvas.
        """
        ids = [self.mask_id if token is None else token for token in canvas]
        x = self._weight(self.layout.embedding)[torch.tensor(ids)[rows.start : rows.stop]]
        for layer in range(self.config[self.layout.layers]):
            h = self._norm(x, self._name(layer, self.layout.attn_norm))
            x = x + self._attention(h, layer, rows, first_written, caches)
            h = self._norm(x, self._name(layer, self.layout.mlp_norm))
            gate, up = (self._linear(h, self._name(layer, part)) for part in (self.layout.gate, self.layout.up))
            x = x + self._linear(gate * torch.sigmoid(gate) * up, self._name(layer, self.layout.down))
        return self._linear(self._norm(x, self.layout.final_norm), self.layout.lm_head)

    def _decode_block(
        self, canvas: list[int | None], block: range, sampling: SamplingParameters, seed: int, ignore_eos: bool
    ) -> int:
        caches = Caches([], [])
        step = 0
        while not self._has_ended(canvas, block, ignore_eos):
            rows, first_written = range(len(canvas)), 0
            if self.recomputes:
                caches = Caches([], [])
            elif step > 0:
                rows, first_written = range(block.start - self.shift, block.stop), block.start
            logits = self.logits(canvas, rows, first_written, caches)
            proposed = {}
            for position in block:
                if canvas[position] is None:
                    row = max(0, position - self.shift) - rows.start
                    proposed[position] = self._propose(logits[row], position, step, sampling, seed)
            for position in choose(proposed, block, step, sampling, seed):
                canvas[position] = proposed[position].token
            step += 1
        return step

    def _has_ended(self, canvas: list[int | None], block: range, ignore_eos: bool) -> bool:
        for position in block:
            if canvas[position] is None:
                return False
            if canvas[position] in self.eos_ids and not ignore_eos:
                return True
        return True

    def _propose(self, logits: Tensor, position: int, step: int, sampling: SamplingParameters, seed: int) -> Proposal:
        """The token of one masked position, and its noise-free distribution's figures."""
        values = logits.double().numpy()
        values[self.mask_id] = -math.inf
        noisy = values
        if sampling.temperature > 0:
            noisy = values + sampling.temperature * noise_of_tokens(seed, len(values), position, step)
        token = int(noisy.argmax())  # numpy gives the lowest of equal ones
        weights = np.exp(values - values.max())
        shares = weights / weights.sum()
        second, first = np.sort(shares)[-2:]
        positive = shares[shares > 0]
        return Proposal(token, float(shares[token]), float(-(positive * np.log(positive)).sum()), float(first - second))

    def _attention(self, h: Tensor, layer: int, rows: range, first_written: int, caches: Caches) -> Tensor:
        layout, heads, kv_heads = self.layout, self.config[self.layout.heads], self.config[self.layout.kv_heads]
        query = self._rotate(self._project(h, layer, layout.query, heads), rows)
        key = self._rotate(self._project(h, layer, layout.key, kv_heads), rows)
        value = self._project(h, layer, layout.value, kv_heads)
        if len(caches.keys) == layer:
            caches.keys.append(key.clone())
            caches.values.append(value.clone())
        written = slice(first_written, rows.stop)
        caches.keys[layer][written] = key[first_written - rows.start :]
        caches.values[layer][written] = value[first_written - rows.start :]
        attended = []
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = query[:, head] @ caches.keys[layer][:, shared].T / math.sqrt(query.shape[-1])
            attended.append(scores.softmax(dim=-1) @ caches.values[layer][:, shared])
        return self._linear(torch.cat(attended, dim=-1), self._name(layer, layout.attn_out))

    def _name(self, layer: int, part: str) -> str:
        return f"{self.layout.layer}{layer}.{part}"

    def _weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config["rms_norm_eps"]) * self._weight(name)

    def _linear(self, h: Tensor, name: str) -> Tensor:
        product = h @ self._weight(name).T
        bias = self.tensors.get(f"{name}.bias")
        return product if bias is None else product + bias

    def _project(self, h: Tensor, layer: int, part: str, heads: int) -> Tensor:
        return self._linear(h, self._name(layer, part)).reshape(len(h), heads, -1)

    def _rotate(self, x: Tensor, rows: range) -> Tensor:
        """Turn the plane of dimensions (i, i + D/2) by position x theta^(-2i/D)."""
        half = x.shape[-1] // 2
        frequencies = torch.tensor([self.config["rope_theta"] ** (-i / half) for i in range(half)])
        angles = torch.tensor(list(rows), dtype=torch.float32)[:, None, None] * frequencies
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def choose(
    proposed: dict[int, Proposal], block: range, step: int, sampling: SamplingParameters, seed: int
) -> list[int]:
    """The positions that one step fixes."""
    rule, own = sampling.unmasking_strategy, sampling.parameters()
    if rule == "random":
        number = 1 + (draw(seed, 0, block.start, step, 1)[0] * len(proposed) >> 32)
        return sorted(proposed, key=lambda position: (draw(seed, 0, position, step, 2)[0], position))[:number]
    if rule == "entropy":
        sure = [p for p in proposed if proposed[p].entropy <= own["entropy_threshold"]]
        return sure or [min(proposed, key=lambda p: (proposed[p].entropy, p))]
    if rule == "margin":
        sure = [p for p in proposed if proposed[p].margin >= own["margin_threshold"]]
        return sure or [min(proposed, key=lambda p: (-proposed[p].margin, p))]
    by_confidence = sorted(proposed, key=lambda position: (-proposed[position].confidence, position))
    if rule == "conf_threshold":
        sure = [p for p in proposed if proposed[p].confidence >= own["confidence_threshold"]]
        return sure or by_confidence[:1]
    if rule == "conf_quota":
        return by_confidence[: int(own["fixed_unmask_quota"])]
    assert rule == "conf_dynamic"
    number = 1
    while number < len(proposed):
        limit = 1 - own["dynamic_unmask_factor"] / (number + 2)
        if proposed[by_confidence[number]].confidence < limit:
            break
        number += 1
    return by_confidence[:number]
