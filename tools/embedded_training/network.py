"""The model as it is trained: the arithmetic of dbench/serve/model.py, over rectangles instead of pages.

A row is a canvas of S tokens, then N tokens of a block stream. Canvas tokens see the canvas alone. Stream tokens stand
for the active block a step later: they see the canvas without the block, and themselves. That is what decoding with
kept keys and values computes, where all but the block's rows stay as the refresh left them; one pass trains both.

Shapes: B rows, S canvas, N stream, X = S + N, T = B X, E d_model, H heads, K KV heads, D head dim, M MLP hidden size,
V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from dbench.errors import ModelError, one_line
from dbench.serve.families import FAMILIES, ModelConfig

logger = logging.getLogger(__name__)

INIT_STD = 0.03
PROBE_LENGTH = 32
ATTENTION_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Those that take any length and need no plan for a new one, in order of preference."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The input of one forward pass."""

    token_BX: Tensor
    position_BX: Tensor
    canvas_length: int
    """S; what follows is the block stream."""
    stream_sees_BX: Tensor | None
    """bool: what the stream's tokens attend to; None when there is no stream."""
    canvas_sees_BS: Tensor | None
    """bool: what the canvas attends to; None: all of it, no padding."""


class Layer(nn.Module):
    """The weights of one layer; query, key and value, and gate and up, lie in one matrix each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.d_model, config.mlp_hidden_size
        qkv_rows = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.attn_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Parameter(torch.empty(qkv_rows, width))
        self.attn_out = nn.Parameter(torch.empty(width, config.n_heads * config.head_dim))
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Parameter(torch.empty(2 * hidden, width))
        self.mlp_out = nn.Parameter(torch.empty(width, hidden))


class Network(nn.Module):
    """A masked-diffusion transformer of the LLaDA family; parameters in float32, computed in `dtype`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, compiled: bool = False) -> None:
        super().__init__()
        assert not FAMILIES[config.family].has_qkv_bias, "biases are not trained here"
        self.config = config
        self.dtype = dtype
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.final_norm = nn.Parameter(torch.ones(config.d_model))
        self.lm_head = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self._enter: Callable[..., tuple[Tensor, Tensor, Tensor]] = compile_or_keep(enter_layer, compiled)
        self._leave: Callable[..., Tensor] = compile_or_keep(leave_layer, compiled)

    def initialise(self, seed: int) -> None:
        """Normal weights; those that write to the residual stream smaller with depth, as in GPT-2."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = 2 * self.config.n_layers if name.endswith(("attn_out", "mlp_out")) else 1
                with torch.no_grad():
                    drawn = torch.empty(parameter.shape).normal_(0.0, INIT_STD / depth**0.5, generator=generator)
                    parameter.copy_(drawn)

    def forward(self, streams: Streams) -> Tensor:
        """Logits of every row in the network's number format: [B, X, V]."""
        with sdpa_kernel(list(ATTENTION_KERNELS)):
            return self._forward(streams)

    def _forward(self, streams: Streams) -> Tensor:
        config = self.config
        num_rows, length = streams.token_BX.shape
        turn = rotation(config, streams.position_BX.flatten())
        sizes = Heads(config.n_heads, config.n_kv_heads, config.head_dim)
        eps = config.rms_norm_eps
        x_TE = embedding(streams.token_BX.flatten(), self.embedding).to(self.dtype)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            qkv = self._enter(x_TE, layer.attn_norm, layer.qkv, turn, sizes, eps)
            q, k, v = (x_TXD.view(num_rows, length, -1, sizes.dim).transpose(1, 2) for x_TXD in qkv)
            out_TF = attend(q, k, v, streams).transpose(1, 2).reshape(num_rows * length, -1)
            after = LeaveWeights(layer.attn_out, layer.mlp_norm, layer.gate_up, layer.mlp_out)
            x_TE = self._leave(x_TE, out_TF, after, eps)
        x_TE = normalise(x_TE, self.final_norm, eps)
        return linear(x_TE, self.lm_head.to(self.dtype)).view(num_rows, length, -1)


def make_network(config: ModelConfig, dtype: torch.dtype, device: torch.device, compiled_tokens: int = 0) -> Network:
    """A network on its device, its weights to be filled.

    With `compiled_tokens` it is compiled for passes over that many tokens; where torch.compile does not work it says
    so and gives a network that is not compiled.
    """
    if not compiled_tokens:
        return Network(config, dtype).to(device)
    network = Network(config, dtype, compiled=True).to(device)
    token_BX = torch.zeros(compiled_tokens // PROBE_LENGTH, PROBE_LENGTH, dtype=torch.int64, device=device)
    try:
        network.initialise(0)
        logits_BXV = network(Streams(token_BX, token_BX, PROBE_LENGTH, None, None))
        torch.autograd.backward(logits_BXV.float().sum())
    except (RuntimeError, ImportError) as error:
        logger.warning("torch.compile does not work here, training goes on without it: %s", one_line(error))
        return make_network(config, dtype, device)
    network.zero_grad(set_to_none=True)
    return network


def compile_or_keep(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False) if compiled else function


class Heads(NamedTuple):
    """Sizes of attention, in a form that torch.compile takes for constants."""

    query: int
    key: int
    dim: int


class Rotation(NamedTuple):
    """float32 [T, 1, D] each, the halves alike."""

    cos: Tensor
    sin: Tensor


class LeaveWeights(NamedTuple):
    """What a layer applies after attention."""

    attn_out_EF: Tensor
    norm_E: Tensor
    gate_up_ME: Tensor
    mlp_out_EM: Tensor


def enter_layer(
    x_TE: Tensor, norm_E: Tensor, qkv_FE: Tensor, turn: Rotation, heads: Heads, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of every token, [T, heads, D] each, query and key rotated in float32."""
    h_TE = normalise(x_TE, norm_E, eps)
    qkv_TXD = linear(h_TE, qkv_FE.to(x_TE.dtype)).view(len(x_TE), -1, heads.dim)
    key_end, half = heads.query + heads.key, heads.dim // 2
    qk = qkv_TXD[:, :key_end].float()
    swapped = torch.cat((-qk[..., half:], qk[..., :half]), dim=-1)
    qk = (qk * turn.cos + swapped * turn.sin).to(x_TE.dtype)
    return qk[:, : heads.query], qk[:, heads.query :], qkv_TXD[:, key_end:]


def leave_layer(x_TE: Tensor, out_TF: Tensor, weights: LeaveWeights, eps: float) -> Tensor:
    """Add attention output and MLP to the residual stream."""
    x_TE = x_TE + linear(out_TF, weights.attn_out_EF.to(x_TE.dtype))
    h_TE = normalise(x_TE, weights.norm_E, eps)
    gate_TM, up_TM = linear(h_TE, weights.gate_up_ME.to(x_TE.dtype)).chunk(2, dim=-1)
    return x_TE + linear(silu(gate_TM) * up_TM, weights.mlp_out_EM.to(x_TE.dtype))


def attend(q_BHXD: Tensor, k_BKXD: Tensor, v_BKXD: Tensor, streams: Streams) -> Tensor:
    """[B, H, X, D]: canvas to canvas, stream to what it may see."""
    length = streams.canvas_length
    grouped = q_BHXD.shape[1] != k_BKXD.shape[1]
    canvas_mask = None if streams.canvas_sees_BS is None else streams.canvas_sees_BS[:, None, None, :]
    canvas = scaled_dot_product_attention(
        q_BHXD[:, :, :length],
        k_BKXD[:, :, :length],
        v_BKXD[:, :, :length],
        attn_mask=canvas_mask,
        enable_gqa=grouped,
    )
    if streams.stream_sees_BX is None:
        return canvas
    stream = scaled_dot_product_attention(
        q_BHXD[:, :, length:], k_BKXD, v_BKXD, attn_mask=streams.stream_sees_BX[:, None, None, :], enable_gqa=grouped
    )
    return torch.cat((canvas, stream), dim=2)


def normalise(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return rms_norm(x_TE, weight_E.shape, weight_E.to(x_TE.dtype), eps)


def rotation(config: ModelConfig, positions_T: Tensor) -> Rotation:
    """Cosine and sine of every token's angles."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions_T.device)
    angles_TD = positions_T.unsqueeze(1).float() * (1.0 / config.rope_theta ** (half / config.head_dim))
    angles_T1D = torch.cat((angles_TD, angles_TD), dim=-1).unsqueeze(1)
    return Rotation(angles_T1D.cos(), angles_T1D.sin())


def checkpoint_tensors(network: Network) -> dict[str, Tensor]:
    """Checkpoint name of the family -> view of the parameter's part that holds it."""
    config = network.config
    names = FAMILIES[config.family].tensors
    tensors: dict[str, Tensor] = {
        f"{names.embedding}.weight": network.embedding,
        f"{names.final_norm}.weight": network.final_norm,
        f"{names.lm_head}.weight": network.lm_head,
    }
    rows = [config.n_heads * config.head_dim] + 2 * [config.n_kv_heads * config.head_dim]
    for number, layer in enumerate(network.layers):
        assert isinstance(layer, Layer)
        q, k, v = torch.split(layer.qkv, rows)
        gate, up = layer.gate_up.chunk(2)
        parts = {
            names.attn_norm: layer.attn_norm,
            names.q: q,
            names.k: k,
            names.v: v,
            names.attn_out: layer.attn_out,
            names.mlp_norm: layer.mlp_norm,
            names.gate: gate,
            names.up: up,
            names.mlp_out: layer.mlp_out,
        }
        prefix = names.layer.format(layer=number)
        tensors |= {f"{prefix}{name}.weight": part for name, part in parts.items()}
    return tensors


@torch.no_grad()
def save_weights(network: Network, path: Path) -> None:
    """bfloat16 under the family's names; whole or not at all."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).clone() for name, tensor in checkpoint_tensors(network).items()
    }
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(path)


@torch.no_grad()
def load_weights(network: Network, path: Path) -> None:
    """Fill the network from such a file. Raises ModelError for one that cannot be read or is of another model."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: no weights that can be read: {one_line(error)}") from error
    targets = checkpoint_tensors(network)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    if shapes != {name: tensor.shape for name, tensor in targets.items()}:
        raise ModelError(f"{path}: names or shapes of tensors are not those of the model that is trained")
    for name, target in targets.items():
        target.copy_(stored[name])
