"""The forward pass of LLaDA-like transformers over packed rows.

Shapes: T packed rows, R rows whose logits are needed, E d_model, H query heads, K KV heads, X heads of several kinds
side by side, D head dim, F heads x head dim, M MLP hidden size, V vocabulary.
Rows of all sequences lie one after another without padding; only attention looks at sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from dbench.serve.attention import AttentionBackend
from dbench.serve.batch import PackedBatch
from dbench.serve.families import ModelConfig
from dbench.serve.kv import KvPool
from dbench.serve.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary angles of some rows, float32: [rows, 1, D] each, the first half of `sin` negated."""

    cos: Tensor
    sin: Tensor

    def rows(self, rows_R: Tensor) -> Rotation:
        return Rotation(self.cos[rows_R], self.sin[rows_R])

    def apply(self, x_THD: Tensor) -> Tensor:
        """Turn the pairs (i, i + D/2) of every head by their row's angles; computed in float32."""
        x = x_THD.float()
        half = x.shape[-1] // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return swapped.mul_(self.sin).addcmul_(x, self.cos).to(x_THD.dtype)


def _nobody_listens(layer: int) -> None:
    """The layers of most batches are nobody's business."""


class Model:
    """Weights and how to run them; holds no state between calls."""

    def __init__(self, config: ModelConfig, weights: Weights, attention: AttentionBackend) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=weights.embedding_VE.device)
        self._frequencies = 1.0 / config.rope_theta ** (half / config.head_dim)

    def forward(self, batch: PackedBatch, kv: KvPool, written: Callable[[int], None] = _nobody_listens) -> Tensor:
        """Write K and V of every row of the batch; give the normalised hidden states of its output rows, [R, E].

        In the last layer, all but K and V is computed for the output rows only. `written` gets every layer's number
        when its K and V are in place.
        """
        config, layers, slots_T = self._config, self._weights.layers, batch.kv_slots_T
        heads, key_end = config.n_heads, config.n_heads + config.n_kv_heads
        rotation = self._rotation(batch.positions_T)
        plan = self._attention.plan(batch.layout)
        x_TE = embedding(batch.token_ids_T, self._weights.embedding_VE)
        for number, layer in enumerate(layers[:-1]):
            h_TE = self._normalise(x_TE, layer.attn_norm_E)
            qkv_TXD = self._heads(linear(h_TE, layer.qkv_FE, layer.qkv_bias_F))
            qk_TXD = rotation.apply(qkv_TXD[:, :key_end])
            kv.write(number, qk_TXD[:, heads:], qkv_TXD[:, key_end:], slots_T)
            written(number)
            self._finish_layer(x_TE, plan.attend(qk_TXD[:, :heads], kv, number), layer)
        return self._last_layer(x_TE, rotation, batch, kv, written)

    def logits(self, x_RE: Tensor) -> Tensor:
        """[R, E] -> [R, V] in the model's number format."""
        return linear(x_RE, self._weights.lm_head_VE)

    def _last_layer(
        self, x_TE: Tensor, rotation: Rotation, batch: PackedBatch, kv: KvPool, written: Callable[[int], None]
    ) -> Tensor:
        config, layer, number = self._config, self._weights.layers[-1], self._config.n_layers - 1
        query_rows = config.n_heads * config.head_dim
        wq_FE, wkv_FE = layer.qkv_FE[:query_rows], layer.qkv_FE[query_rows:]
        bias_F = layer.qkv_bias_F
        h_TE = self._normalise(x_TE, layer.attn_norm_E)
        kv_TXD = self._heads(linear(h_TE, wkv_FE, None if bias_F is None else bias_F[query_rows:]))
        k_TKD, v_TKD = kv_TXD[:, : config.n_kv_heads], kv_TXD[:, config.n_kv_heads :]
        kv.write(number, rotation.apply(k_TKD), v_TKD, batch.kv_slots_T)
        written(number)
        rows_R = batch.output_rows_R
        q_RHD = self._heads(linear(h_TE[rows_R], wq_FE, None if bias_F is None else bias_F[:query_rows]))
        x_RE = x_TE[rows_R]
        plan = self._attention.plan(batch.output_layout)
        self._finish_layer(x_RE, plan.attend(rotation.rows(rows_R).apply(q_RHD), kv, number), layer)
        return self._normalise(x_RE, self._weights.final_norm_E)

    def _finish_layer(self, x_TE: Tensor, attended_TF: Tensor, layer: LayerWeights) -> None:
        """Add attention output and MLP to the residual stream, in place."""
        x_TE.addmm_(attended_TF, layer.attn_out_EF.t())
        h_TE = self._normalise(x_TE, layer.mlp_norm_E)
        gate_TM, up_TM = linear(h_TE, layer.gate_up_ME).chunk(2, dim=-1)
        x_TE.addmm_(silu(gate_TM).mul_(up_TM), layer.mlp_out_EM.t())

    def _normalise(self, x_TE: Tensor, weight_E: Tensor) -> Tensor:
        return rms_norm(x_TE, weight_E.shape, weight_E, self._config.rms_norm_eps)

    def _heads(self, x_TF: Tensor) -> Tensor:
        return x_TF.view(len(x_TF), -1, self._config.head_dim)

    def _rotation(self, positions_T: Tensor) -> Rotation:
        angles_TD = positions_T.unsqueeze(1).float() * self._frequencies
        cos_TD, sin_TD = angles_TD.cos(), angles_TD.sin()
        return Rotation(
            torch.cat((cos_TD, cos_TD), dim=-1).unsqueeze(1), torch.cat((-sin_TD, sin_TD), dim=-1).unsqueeze(1)
        )
