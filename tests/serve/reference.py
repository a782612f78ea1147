"""A dense decoder for one sequence, written to be read: what the runner must agree with, id for id.

No pages, no packing, no batches, nothing shared with dbench but the names of the sampling parameters. The forward
works on whole matrices of one canvas; choosing is plain Python.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
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


class Reference:
    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
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

    def _decode_block(
        self, canvas: list[int | None], block: range, sampling: SamplingParameters, seed: int, ignore_eos: bool
    ) -> int:
        caches = Caches([], [])
        step = 0
        while not self._has_ended(canvas, block, ignore_eos):
            rows = range(len(canvas)) if step == 0 else block
            logits = self._forward(canvas, rows, caches)
            masked = [position for position in block if canvas[position] is None]
            proposed = {
                position: self._propose(logits[position - rows.start].tolist(), position, step, sampling, seed)
                for position in masked
            }
            for position in choose(proposed, block, step, sampling, seed):
                canvas[position] = proposed[position][0]
            step += 1
        return step

    def _has_ended(self, canvas: list[int | None], block: range, ignore_eos: bool) -> bool:
        for position in block:
            if canvas[position] is None:
                return False
            if canvas[position] in self.eos_ids and not ignore_eos:
                return True
        return True

    def _propose(
        self, logits: list[float], position: int, step: int, sampling: SamplingParameters, seed: int
    ) -> tuple[int, float]:
        """The token of one masked position and its probability without noise."""
        allowed = [token for token in range(len(logits)) if token != self.mask_id]
        best, best_value = -1, -math.inf
        for token in allowed:
            value = logits[token]
            if sampling.temperature > 0:
                value += sampling.temperature * noise(seed, token, position, step)
            if value > best_value:
                best, best_value = token, value
        highest = max(logits[token] for token in allowed)
        total = sum(math.exp(logits[token] - highest) for token in allowed)
        return best, math.exp(logits[best] - highest) / total

    def _forward(self, canvas: list[int | None], rows: range, caches: Caches) -> Tensor:
        """Logits of `rows`; their K and V replace what `caches` hold, or fill them when the rows are all."""
        ids = [self.mask_id if token is None else token for token in canvas]
        x = self._tensor("wte")[torch.tensor(ids)[rows.start : rows.stop]]
        heads, kv_heads = self.config["n_heads"], self.config["n_kv_heads"]
        for layer in range(self.config["n_layers"]):
            h = self._norm(x, f"blocks.{layer}.attn_norm")
            query = self._rotate(self._project(h, layer, "q_proj", heads), rows)
            key = self._rotate(self._project(h, layer, "k_proj", kv_heads), rows)
            value = self._project(h, layer, "v_proj", kv_heads)
            if len(rows) == len(canvas):
                caches.keys.append(key)
                caches.values.append(value)
            caches.keys[layer][rows.start : rows.stop] = key
            caches.values[layer][rows.start : rows.stop] = value
            attended = []
            for head in range(heads):
                shared = head * kv_heads // heads
                scores = query[:, head] @ caches.keys[layer][:, shared].T / math.sqrt(query.shape[-1])
                attended.append(scores.softmax(dim=-1) @ caches.values[layer][:, shared])
            x = x + torch.cat(attended, dim=-1) @ self._tensor(f"blocks.{layer}.attn_out").T
            h = self._norm(x, f"blocks.{layer}.ff_norm")
            gate = h @ self._tensor(f"blocks.{layer}.ff_proj").T
            up = h @ self._tensor(f"blocks.{layer}.up_proj").T
            x = x + (gate * torch.sigmoid(gate) * up) @ self._tensor(f"blocks.{layer}.ff_out").T
        return self._norm(x, "ln_f") @ self._tensor("ff_out").T

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[f"model.transformer.{name}.weight"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config["rms_norm_eps"]) * self._tensor(name)

    def _project(self, h: Tensor, layer: int, name: str, heads: int) -> Tensor:
        return (h @ self._tensor(f"blocks.{layer}.{name}").T).reshape(len(h), heads, -1)

    def _rotate(self, x: Tensor, rows: range) -> Tensor:
        """Turn the plane of dimensions (i, i + D/2) by position x theta^(-2i/D)."""
        dimensions = x.shape[-1]
        turned = x.clone()
        for i in range(dimensions // 2):
            frequency = self.config["rope_theta"] ** (-2 * i / dimensions)
            angle = torch.tensor([position * frequency for position in rows])[:, None]
            a, b = x[..., i], x[..., i + dimensions // 2]
            turned[..., i] = a * angle.cos() - b * angle.sin()
            turned[..., i + dimensions // 2] = b * angle.cos() + a * angle.sin()
        return turned


def choose(
    proposed: dict[int, tuple[int, float]], block: range, step: int, sampling: SamplingParameters, seed: int
) -> list[int]:
    """The positions that one step fixes."""
    by_confidence = sorted(proposed, key=lambda position: (-proposed[position][1], position))
    if sampling.unmasking_strategy == "conf_threshold":
        assert sampling.confidence_threshold is not None
        sure = [p for p in proposed if proposed[p][1] >= sampling.confidence_threshold]
        return sure or by_confidence[:1]
    if sampling.unmasking_strategy == "conf_quota":
        return by_confidence[: sampling.fixed_unmask_quota]
    assert sampling.unmasking_strategy == "random"
    number = 1 + (draw(seed, 0, block.start, step, 1)[0] * len(proposed) >> 32)
    return sorted(proposed, key=lambda position: (draw(seed, 0, position, step, 2)[0], position))[:number]
