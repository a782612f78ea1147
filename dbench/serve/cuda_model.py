"""The forward pass of LLaDA-like transformers on CUDA: the arithmetic of `model.py` in reserved memory.

Shapes: T packed rows, B spans, L block length, R = B x L block rows, E d_model, H query heads, K KV heads,
X = H + 2 K heads side by side, D head dim, F heads x head dim, M MLP hidden size, V vocabulary.

Short spans (a block) come first and attend over their pages; long spans (a whole canvas) come after them and attend
among their own rows. Nothing here waits for the device or takes memory from it, so a pass over short spans alone can
be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dbench.serve.batch import SlotTable
from dbench.serve.cuda_batch import BatchShape, PassSizes
from dbench.serve.families import ModelConfig
from dbench.serve.kernels.attention import (
    LaunchShape,
    SpanAttention,
    SpanKeys,
    Tiling,
    choose_tiling,
    counts_to_compile,
)
from dbench.serve.kernels.elementwise import Rotary, rms_norm, silu_times
from dbench.serve.kernels.layout import RowBuffers
from dbench.serve.kv import KvPool
from dbench.serve.op_marks import NO_MARKS, Marks
from dbench.serve.refresh_attention import RefreshAttention
from dbench.serve.runner import Operation
from dbench.serve.weights import LayerWeights, Weights


class Workspace:
    """Every intermediate result of a pass, once."""

    def __init__(self, config: ModelConfig, sizes: PassSizes, like: Tensor) -> None:
        def room(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

        rows, block_rows = sizes.num_rows, sizes.num_spans * sizes.block_length
        self.x_TE = room(rows, config.d_model)
        self.normed_TE = room(rows, config.d_model)
        self.qkv_TXD = room(rows, config.n_heads + 2 * config.n_kv_heads, config.head_dim)
        self.attended_TF = room(rows, config.n_heads * config.head_dim)
        self.gate_up_TM = room(rows, 2 * config.mlp_hidden_size)
        self.gated_TM = room(rows, config.mlp_hidden_size)
        self.x_RE = room(block_rows, config.d_model)
        self.normed_RE = room(block_rows, config.d_model)
        self.q_RF = room(block_rows, config.n_heads * config.head_dim)

    def rows(self, count: int) -> RowViews:
        """The first packed rows."""
        return self._views(self.x_TE[:count], self.normed_TE[:count])

    def block_rows(self, count: int) -> RowViews:
        """The first block rows; from attention on they use the memory of packed rows, which are done with it."""
        return self._views(self.x_RE[:count], self.normed_RE[:count])

    def _views(self, x: Tensor, normed: Tensor) -> RowViews:
        count = len(x)
        return RowViews(x, normed, self.attended_TF[:count], self.gate_up_TM[:count], self.gated_TM[:count])


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """What a pass reads of its launch, and the pages that it reads and writes."""

    rows: RowBuffers
    slots_B: Tensor
    """int32, one per span and longer."""
    slots: SlotTable
    kv: KvPool

    def keys_of(self, num_spans: int) -> SpanKeys:
        """What the first spans attend to."""
        slots = self.slots
        return SpanKeys(self.slots_B[:num_spans], slots.pages_SN, slots.length_S, slots.sizes.page_size)


@dataclass(frozen=True, slots=True)
class RowViews:
    """Where some rows are, from the residual stream to the MLP."""

    x_TE: Tensor
    normed_TE: Tensor
    attended_TF: Tensor
    gate_up_TM: Tensor
    gated_TM: Tensor


@dataclass(frozen=True, slots=True)
class PassViews:
    """The parts of a workspace that a pass uses: the same in every layer, and made once."""

    rows: RowViews
    qkv_TF: Tensor
    qkv_TXD: Tensor
    last_kv_TF: Tensor
    """Keys and values of the last layer, side by side."""
    last_kv_TXD: Tensor
    short_q_RHD: Tensor
    short_out_RF: Tensor
    long_q_RHD: Tensor
    long_k_RKD: Tensor
    long_v_RKD: Tensor
    long_out_RHD: Tensor

    @staticmethod
    def of(room: Workspace, shape: BatchShape, config: ModelConfig) -> PassViews:
        num_rows, num_short_rows = shape.num_rows, shape.num_short_rows
        rows, qkv_TXD = room.rows(num_rows), room.qkv_TXD[:num_rows]
        last_kv_TXD = qkv_TXD.flatten()[: num_rows * 2 * config.n_kv_heads * config.head_dim].view(
            num_rows, 2 * config.n_kv_heads, config.head_dim
        )
        long_q_RHD, long_k_RKD, long_v_RKD = qkv_TXD[num_short_rows:].split(
            [config.n_heads, config.n_kv_heads, config.n_kv_heads], dim=1
        )
        return PassViews(
            rows=rows,
            qkv_TF=qkv_TXD.flatten(1),
            qkv_TXD=qkv_TXD,
            last_kv_TF=last_kv_TXD.flatten(1),
            last_kv_TXD=last_kv_TXD,
            short_q_RHD=qkv_TXD[:num_short_rows, : config.n_heads],
            short_out_RF=rows.attended_TF[:num_short_rows],
            long_q_RHD=long_q_RHD,
            long_k_RKD=long_k_RKD,
            long_v_RKD=long_v_RKD,
            long_out_RHD=rows.attended_TF[num_short_rows:].unflatten(1, (config.n_heads, config.head_dim)),
        )


@dataclass(frozen=True, slots=True)
class TurnedWeights:
    """A layer's matrices as products take them, transposed; the same memory."""

    qkv_EF: Tensor
    attn_out_FE: Tensor
    gate_up_EM: Tensor
    mlp_out_ME: Tensor

    @staticmethod
    def of(layer: LayerWeights) -> TurnedWeights:
        return TurnedWeights(layer.qkv_FE.t(), layer.attn_out_EF.t(), layer.gate_up_ME.t(), layer.mlp_out_EM.t())


class CudaModel:
    """Weights, and room for one pass at a time on one device."""

    def __init__(self, config: ModelConfig, weights: Weights, refresh: RefreshAttention, sizes: PassSizes) -> None:
        device = weights.embedding_VE.device
        self.weights = weights
        self._config, self._refresh, self._sizes = config, refresh, sizes
        self._last_layer = config.n_layers - 1
        self._query_width = config.n_heads * config.head_dim
        self._room = Workspace(config, sizes, weights.embedding_VE)
        self._lm_head_EV = weights.lm_head_VE.t()
        self._turned = tuple(TurnedWeights.of(layer) for layer in weights.layers)
        self._attention = SpanAttention(config.n_heads, config.n_kv_heads, config.head_dim)
        self._tilings: dict[tuple[int, int], Tiling] = {}
        for rows in {sizes.short_rows, sizes.block_length}:
            for num_spans in range(1, sizes.num_spans + 1):
                tiling = choose_tiling(self._launch_shape(num_spans, rows), device)
                self._attention.reserve(num_spans, rows, tiling, device)
                self._tilings[num_spans, rows] = tiling
        self.counts_to_compile = counts_to_compile(self._tilings)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / config.rope_theta ** (half / config.head_dim)
        positions = torch.arange(max(sizes.longest_canvas, sizes.short_rows), dtype=torch.float32, device=device)
        angles = positions.unsqueeze(1) * frequencies
        self._rotary = Rotary(angles.cos(), angles.sin(), config.n_heads, config.n_kv_heads)

    def forward(
        self,
        shape: BatchShape,
        batch: DeviceBatch,
        marks: Marks = NO_MARKS,
        stretch: Callable[[int], None] | None = None,
    ) -> None:
        """Write K and V of every row; `hidden` then has the states of every span's block rows.

        The refresh attention has been planned for the long spans. `stretch` replays what `run_stretch` would run.
        """
        views = PassViews.of(self._room, shape, self._config)
        run_stretch = stretch or partial(self.run_stretch, views=views, batch=batch, marks=marks)
        keys = batch.keys_of(shape.num_short)
        for number in range(self._last_layer):
            run_stretch(number)
            marks.begin(Operation.ATTENTION)
            if shape.num_short:
                tiling = self._tilings[shape.num_short, shape.short_rows]
                self._attention.run(views.short_q_RHD, batch.kv.layer(number), keys, tiling, views.short_out_RF)
            if shape.long_lengths:
                self._refresh.run(views.long_q_RHD, views.long_k_RKD, views.long_v_RKD, views.long_out_RHD)
            marks.end(Operation.ATTENTION)
        run_stretch(self._last_layer)
        self._finish_block_rows(shape, batch)

    @property
    def num_stretches(self) -> int:
        """One per layer."""
        return self._config.n_layers

    def views(self, num_rows: int) -> PassViews:
        """Of rows whose spans do not matter: all that `run_stretch` needs."""
        return PassViews.of(self._room, BatchShape(0, self._sizes.short_rows, (num_rows,)), self._config)

    def run_stretch(self, number: int, views: PassViews, batch: DeviceBatch, marks: Marks = NO_MARKS) -> None:
        """All rows from the attention of the layer before, or from their token ids, to the attention of layer `number`.

        The last layer's rows get keys and values alone: its queries are those of the block rows.
        """
        rows, places, layer = views.rows, batch.rows, self.weights.layers[number]
        if number == 0:
            torch.index_select(self.weights.embedding_VE, 0, places.token_ids_T[: len(rows.x_TE)], out=rows.x_TE)
        else:
            self._finish_layer(number - 1, rows, marks)
        marks.enter(number)
        self._normalise(rows.x_TE, layer.attn_norm_E, rows.normed_TE)
        marks.begin(Operation.QKV)
        matrix_EF, out_TF, out_TXD = self._turned[number].qkv_EF, views.qkv_TF, views.qkv_TXD
        if number == self._last_layer:
            matrix_EF, out_TF, out_TXD = matrix_EF[:, self._query_width :], views.last_kv_TF, views.last_kv_TXD
        torch.mm(rows.normed_TE, matrix_EF, out=out_TF)
        kv_2PKD = batch.kv.layer(number)
        self._rotary.turn_and_store(out_TXD, layer.qkv_bias_F, places.positions_T, places.places_T, kv_2PKD)
        marks.end(Operation.QKV)
        marks.written(number)

    def hidden(self, num_rows: int) -> Tensor:
        """The normalised hidden states of the last pass's block rows, [R, E]; they hold until the next pass."""
        return self._room.normed_RE[:num_rows]

    def logits(self, x_RE: Tensor, out_RV: Tensor) -> None:
        """[R, E] -> [R, V] in the model's number format."""
        torch.mm(x_RE, self._lm_head_EV, out=out_RV)

    def _finish_block_rows(self, shape: BatchShape, batch: DeviceBatch) -> None:
        """The last layer's queries, attention and MLP, for the block rows alone."""
        rows, config, room, number = batch.rows, self._config, self._room, self._last_layer
        num_spans, layer = shape.num_spans, self.weights.layers[number]
        every, block = room.rows(shape.num_rows), room.block_rows(num_spans * self._sizes.block_length)
        block_rows_R, q_RF = rows.block_rows_BL[:num_spans].flatten(), room.q_RF[: len(block.x_TE)]
        torch.index_select(every.x_TE, 0, block_rows_R, out=block.x_TE)
        torch.index_select(every.normed_TE, 0, block_rows_R, out=block.normed_TE)
        torch.mm(block.normed_TE, self._turned[number].qkv_EF[:, : self._query_width], out=q_RF)
        q_RHD = q_RF.unflatten(1, (config.n_heads, config.head_dim))
        self._rotary.turn_queries(q_RHD, layer.qkv_bias_F, rows.block_positions_BL[:num_spans].flatten())
        tiling = self._tilings[num_spans, self._sizes.block_length]
        self._attention.run(q_RHD, batch.kv.layer(number), batch.keys_of(num_spans), tiling, block.attended_TF)
        self._finish_layer(number, block, NO_MARKS)
        self._normalise(block.x_TE, self.weights.final_norm_E, block.normed_TE)

    def _finish_layer(self, number: int, rows: RowViews, marks: Marks) -> None:
        """Add attention output and MLP to the residual stream, in place."""
        layer, turned = self.weights.layers[number], self._turned[number]
        rows.x_TE.addmm_(rows.attended_TF, turned.attn_out_FE)
        marks.begin(Operation.MLP)
        self._normalise(rows.x_TE, layer.mlp_norm_E, rows.normed_TE)
        torch.mm(rows.normed_TE, turned.gate_up_EM, out=rows.gate_up_TM)
        silu_times(rows.gate_up_TM, rows.gated_TM)
        rows.x_TE.addmm_(rows.gated_TM, turned.mlp_out_ME)
        marks.end(Operation.MLP)

    def _normalise(self, x_TE: Tensor, weight_E: Tensor, out_TE: Tensor) -> None:
        rms_norm(x_TE, weight_E, self._config.rms_norm_eps, out_TE)

    def _launch_shape(self, num_spans: int, num_rows: int) -> LaunchShape:
        config = self._config
        return LaunchShape(
            num_spans=num_spans,
            queries=num_rows * config.n_heads // config.n_kv_heads,
            kv_heads=config.n_kv_heads,
            bytes_per_key_head=config.head_dim * self.weights.embedding_VE.element_size(),
            longest=self._sizes.longest_canvas,
        )
