"""Filling a model: from shards in place, refused by name, or at random from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dbench.errors import ModelError
from dbench.serve.families import find_model, read_model_config
from dbench.serve.weights import Weights, WeightSource, load_weights
from tests.serve.checkpoints import TINY_DREAM, tiny_dream_tensors, tiny_tensors, write_checkpoint

LAYER = "model.transformer.blocks.1."


def load(directory: Path, *, load_format: str = "auto", dtype: torch.dtype = torch.float32, seed: int = 0) -> Weights:
    source = WeightSource(directory, load_format, dtype, torch.device("cpu"), seed)
    return load_weights(read_model_config(directory), source)


def all_of(weights: Weights) -> list[Tensor]:
    layers = [
        tensor
        for layer in weights.layers
        for tensor in (layer.qkv_FE, layer.attn_out_EF, layer.gate_up_ME, layer.mlp_out_EM)
    ]
    return [weights.embedding_VE, weights.lm_head_VE, *layers]


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_every_tensor_of_a_checkpoint_finds_its_place(tmp_path: Path, num_shards: int) -> None:
    tensors = tiny_tensors(n_kv_heads=2)
    weights = load(write_checkpoint(tmp_path, tensors, num_shards, n_kv_heads=2))
    layer = weights.layers[1]

    def joined(*names: str) -> Tensor:
        return torch.cat([tensors[f"{LAYER}{name}.weight"] for name in names])

    assert torch.equal(layer.qkv_FE, joined("q_proj", "k_proj", "v_proj"))
    assert torch.equal(layer.gate_up_ME, joined("ff_proj", "up_proj"))
    assert torch.equal(layer.mlp_out_EM, joined("ff_out"))
    assert torch.equal(layer.attn_out_EF, joined("attn_out"))
    assert torch.equal(layer.attn_norm_E, joined("attn_norm"))
    assert torch.equal(layer.mlp_norm_E, joined("ff_norm"))
    assert torch.equal(weights.embedding_VE, tensors["model.transformer.wte.weight"])
    assert torch.equal(weights.final_norm_E, tensors["model.transformer.ln_f.weight"])
    assert torch.equal(weights.lm_head_VE, tensors["model.transformer.ff_out.weight"])


def test_biases_lie_beside_their_projections(tmp_path: Path) -> None:
    tensors = tiny_dream_tensors()
    weights = load(write_checkpoint(tmp_path, tensors, config=TINY_DREAM))
    attention, layer = "model.layers.1.self_attn.", weights.layers[1]
    for kind, found in (("weight", layer.qkv_FE), ("bias", layer.qkv_bias_F)):
        wanted = [tensors[f"{attention}{part}.{kind}"] for part in ("q_proj", "k_proj", "v_proj")]
        assert found is not None
        assert torch.equal(found, torch.cat(wanted))
    assert torch.equal(layer.gate_up_ME[:48], tensors["model.layers.1.mlp.gate_proj.weight"])
    assert torch.equal(weights.lm_head_VE, tensors["lm_head.weight"])


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_proj.bias", "lm_head.weight"])
def test_a_dream_checkpoint_without_a_bias_or_a_head_is_refused_by_name(tmp_path: Path, name: str) -> None:
    tensors = tiny_dream_tensors()
    del tensors[name]
    with pytest.raises(ModelError, match=f"1 missing tensors: {name}"):
        load(write_checkpoint(tmp_path, tensors, config=TINY_DREAM))


def test_an_output_projection_with_a_bias_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {**tiny_dream_tensors(), "model.layers.0.self_attn.o_proj.bias": torch.zeros(32)}
    with pytest.raises(ModelError, match=r"1 unknown tensors: model\.layers\.0\.self_attn\.o_proj\.bias"):
        load(write_checkpoint(tmp_path, tensors, config=TINY_DREAM))


def test_a_head_may_be_wider_than_its_share_of_the_model(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, {}, 1, config=TINY_DREAM, head_dim=16)
    layer = load(directory, load_format="random").layers[0]
    assert (layer.qkv_FE.shape, layer.attn_out_EF.shape) == ((4 * 16 + 2 * 2 * 16, 32), (32, 4 * 16))


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])
def test_a_named_size_gets_random_weights_of_its_shapes(name: str) -> None:
    weights = load(find_model(name), load_format="random")
    assert (len(weights.layers), weights.embedding_VE.shape) == (4, (1024, 128))
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        load(find_model(name))


def test_tensors_are_rounded_to_the_wanted_number_format(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    weights = load(write_checkpoint(tmp_path, tensors), dtype=torch.bfloat16)
    assert torch.equal(weights.embedding_VE, tensors["model.transformer.wte.weight"].bfloat16())
    assert all(tensor.dtype == torch.bfloat16 for tensor in all_of(weights))


def test_missing_tensors_are_counted_and_named(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tiny_tensors().items() if "up_proj" not in name}
    with pytest.raises(ModelError, match=rf"3 missing tensors: .*{LAYER}up_proj\.weight"):
        load(write_checkpoint(tmp_path, tensors))


def test_a_long_list_of_names_is_cut(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tiny_tensors().items() if "blocks.1" not in name}
    with pytest.raises(ModelError, match=r"9 missing tensors: .* and 5 more$"):
        load(write_checkpoint(tmp_path, tensors))


def test_tensors_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    tensors = {**tiny_tensors(), f"{LAYER}q_proj.bias": torch.zeros(32)}
    with pytest.raises(ModelError, match=rf"1 unknown tensors: {LAYER}q_proj\.bias"):
        load(write_checkpoint(tmp_path, tensors))


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"k_proj\.weight is \[16, 32\], wanted \[32, 32\]"):
        load(write_checkpoint(tmp_path, tiny_tensors(n_kv_heads=2)))


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_tensors())
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"shards missing: model-00002-of-00002\.safetensors"):
        load(directory)


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_tensors())
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors: not a safetensors file"):
        load(directory)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    directory = write_checkpoint(tmp_path, tiny_tensors())
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json: no readable weight_map"):
        load(directory)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [('{"weight_map": {}}', r"names no file"), ('{"weight_map": {"a": 3}}', r"shards missing: 3")],
)
def test_an_index_that_names_no_shards_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    directory = write_checkpoint(tmp_path, tiny_tensors())
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=wanted):
        load(directory)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, num_shards=1)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors in .*--load-format random"):
        load(tmp_path)


def test_an_unknown_load_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"unknown load format 'dummy' \(known: auto, random\)"):
        load(write_checkpoint(tmp_path, tiny_tensors()), load_format="dummy")


def test_random_weights_fill_the_same_shapes_and_leave_the_checkpoint_unread(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_tensors())
    random, real = load(directory, load_format="random"), load(directory)
    assert [tensor.shape for tensor in all_of(random)] == [tensor.shape for tensor in all_of(real)]
    assert not torch.equal(random.embedding_VE, real.embedding_VE)
    assert torch.equal(random.final_norm_E, torch.ones(32))
    assert all(torch.equal(layer.attn_norm_E, torch.ones(32)) for layer in random.layers)
    assert float(random.layers[0].qkv_FE.std()) == pytest.approx(0.3, rel=0.05)


def test_random_weights_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    deep = write_checkpoint(tmp_path / "deep", {}, 1, n_layers=5)
    shallow = write_checkpoint(tmp_path / "shallow", {}, 1, n_layers=2)
    five, two = load(deep, load_format="random", seed=4), load(shallow, load_format="random", seed=4)
    assert torch.equal(five.layers[1].qkv_FE, two.layers[1].qkv_FE)
    assert torch.equal(five.lm_head_VE, two.lm_head_VE)
    assert not torch.equal(five.lm_head_VE, five.embedding_VE)
    other = load(deep, load_format="random", seed=5)
    assert not any(torch.equal(a, b) for a, b in zip(all_of(five), all_of(other), strict=True))


def test_the_embedded_model_holds_about_five_million_weights() -> None:
    assert 4_500_000 < sum(tensor.numel() for tensor in all_of(load(find_model("embedded")))) < 5_500_000


def test_quantised_weights_are_refused_by_their_number_format(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors[f"{LAYER}q_proj.weight"] = tensors[f"{LAYER}q_proj.weight"].to(torch.int8)
    with pytest.raises(ModelError, match=r"blocks\.1\.q_proj\.weight is I8, wanted one of BF16, F16, F32"):
        load(write_checkpoint(tmp_path, tensors))


def test_a_tensor_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_tensors(), 1)
    shard = next(directory.glob("*.safetensors"))
    for index in directory.glob("*.index.json"):
        index.unlink()
    (directory / "other.safetensors").write_bytes(shard.read_bytes())
    with pytest.raises(ModelError, match=rf"is both in {shard.name} and in other\.safetensors"):
        load(directory)
