"""Families of GGUF files whose converter changes more than names: the logits of transformers, for
short and long prompts and while decoding, alone and in a batch of the server; and those of
llama.cpp, which would notice if the converter did something else than we think.

MOE_INFINITY_LLAMA_PYTHON names an interpreter that has llama_cpp and numpy; without it the tests
of llama.cpp are skipped.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFValueType as T

from moe_infinity import MoE
from moe_infinity.architectures.model_parts import PackedLinear, ReorderedLinear
from tests.closeness import distance, logits_of_steps
from tests.conftest import save_tokenizer
from tests.gguf_files import build, rewrite, stock_model, widen
from tests.gguf_models import MODELS, WIDE
from tests.server.driving import Client, cached, generated, make_engine, run_all
from tools.convert_to_gguf import convert

pytestmark = pytest.mark.arithmetic

FAMILIES = (
    "qwen3_5_moe_text", "qwen4_exp_text", "gemma4_text", "lfm2_moe", "granitemoehybrid",
    "nemotron_h",
)  # fmt: skip
# By model, what of the config is another for llama.cpp, which computes it in one way only.
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
YARN = MODELS["gpt_oss"]["rope_parameters"]
FOR_LLAMA_CPP = {
    "gpt_oss": {"rope_parameters": YARN | {"truncate": True}},
    "deepseek_v32": {"index_topk": 2048},
    "deepseek_v4": {"index_topk": 512},
    "glm5_next": {"index_topk": 2048},
    "glm_moe_dsa": {"index_topk": 2048},
    "mistral4": {  # no key has the growth of queries behind the context of training
        "rope_parameters": MODELS["mistral4"]["rope_parameters"]
        | {"original_max_position_embeddings": 2048},
    },
    "mellum": {
        "rope_parameters": dict.fromkeys(MODELS["mellum"]["rope_parameters"], ROPE),
    },
}
UNLIKE_LLAMA_CPP = ("phimoe",)  # docs/gguf.md says why
ALONE = (  # whose caches the server cannot join
    "deepseek_v32", "deepseek_v4", "glm5_next", "glm_moe_dsa", "minimax_m3_vl_text",
    "qwen4_exp_text",
)  # fmt: skip
WITHOUT_PREFIXES = (*ALONE, "jamba")
CACHES = ("gpt_oss", "granitemoehybrid", "deepseek_v3")  # with a window, recurrent, latent
LLAMA_PYTHON = os.environ.get("MOE_INFINITY_LLAMA_PYTHON")
LLAMA_LOGITS = Path(__file__).parents[1] / "benchmarks" / "llama_logits.py"
# Of the largest logit. Between two arithmetics it is as large as between either and float64.
TOLERANCES = {True: 1e-5, False: 1e-4}  # by `exact`


def made(name: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint with its file f32.gguf, for long prompts."""
    build(name, folder, max_position_embeddings=1024, **changes)
    convert(folder, folder / "f32.gguf", "f32")
    return folder


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of a family, and a tokenizer beside the file."""
    folder = made(request.param, tmp_path_factory.mktemp(request.param))
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def stock_logits(folder: Path) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By the length of a prompt: of it and 12 more tokens at once, and of the 12 one by one."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    with torch.no_grad():
        for length in (3, 70, 700):
            ids = ids_of(length + 12)
            found[length] = stock(ids).logits, logits_of_steps(stock, ids, length)
    return found


@functools.cache
def ids_of(length: int) -> torch.Tensor:
    return torch.randint(3, 120, (1, length), generator=torch.Generator().manual_seed(length))


def opened(file: Path, **options: Any) -> MoE:
    return MoE(file, device="cpu", dtype="float32", host_memory="50%", **options)


@pytest.mark.grid
@pytest.mark.parametrize("exact", [True, False])
def test_prompts_and_decode_steps_have_the_logits_of_transformers(exact, folder, stock_logits):
    with torch.no_grad(), opened(folder / "f32.gguf", exact=exact) as moe:
        for length, (at_once, in_steps) in stock_logits.items():
            ids = ids_of(length + 12)
            assert distance(moe.model(ids).logits, at_once) < TOLERANCES[exact], length
            found = logits_of_steps(moe.model, ids, length)
            assert distance(found, in_steps) < TOLERANCES[exact], length


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in CACHES else pytest.mark.slow) for name in MODELS],
)
def test_the_server_has_the_tokens_of_generate(name, tmp_path):
    """In a batch, with prompts in chunks, and where the beginning of a prompt is known."""
    window = {"sliding_window": 32} if MODELS[name].get("sliding_window") else {}
    folder = made(name, tmp_path, **window)
    save_tokenizer(folder)
    prompts = [ids_of(length)[0].tolist() for length in (3, 72, 20, 131)]
    max_batch = 1 if name in ALONE else 4
    with opened(folder / "f32.gguf", config_from=str(folder)) as moe:
        engine = make_engine(moe, max_batch=max_batch, prefill_chunk=32)
        for turn in range(2):
            expected = [generated(moe, prompt, max_new_tokens=5) for prompt in prompts]
            clients = [Client(engine, prompt, max_new_tokens=5) for prompt in prompts]
            run_all(engine, *clients)
            assert [client.token_ids for client in clients] == expected
            prompts = [
                [*ids, *found, 5 + turn] for ids, found in zip(prompts, expected, strict=True)
            ]
        is_known = [cached(client) > 0 for client in clients[1:]]
        assert is_known == [name not in WITHOUT_PREFIXES] * 3


@pytest.mark.grid
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["glm5_next", "qwen3_vl_moe"])
def test_a_model_whose_class_sees_has_the_logits_of_transformers_without_eyes(
    name, exact, tmp_path
):
    """transformers has them only with a vision part, which the file does not have. An index chooses
    all tokens: which are the best of them is a near tie for some.
    """
    folder = made(name, tmp_path, **FOR_LLAMA_CPP.get(name, {}))
    stock = stock_model(folder)
    with torch.no_grad(), opened(folder / "f32.gguf", config_from=str(folder), exact=exact) as moe:
        for length in (3, 70, 700):
            ids = ids_of(length)
            assert distance(moe.model(ids).logits, stock(ids).logits) < TOLERANCES[exact], length
        in_steps = [logits_of_steps(model, ids_of(82), 70) for model in (moe.model, stock)]
        assert distance(*in_steps) < TOLERANCES[exact]
        assert moe.processor is None
        assert not any("visual" in name for name in moe.model.state_dict())


@pytest.mark.skipif(LLAMA_PYTHON is None, reason="MOE_INFINITY_LLAMA_PYTHON names no interpreter")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNLIKE_LLAMA_CPP])
def test_llama_cpp_has_the_same_logits(name, tmp_path):
    folder = made(name, tmp_path / name, **FOR_LLAMA_CPP.get(name, {}))
    file = folder / "f32.gguf"
    with torch.no_grad(), opened(file, config_from=str(folder)) as moe:
        for length in (3, 70, 700):
            ours = moe.model(ids_of(length)).logits.numpy()
            theirs = logits_of_llama_cpp(file, ids_of(length), tmp_path)
            # Of most tokens: where a router's choice is nearly a tie, any rounding changes it.
            of_tokens = [np.corrcoef(*pair)[0, 1] for pair in zip(ours[0], theirs[0], strict=True)]
            assert np.median(of_tokens) > 0.9999


def logits_of_llama_cpp(file: Path, ids: torch.Tensor, scratch: Path) -> np.ndarray:
    np.save(scratch / "ids.npy", ids.numpy())
    given = [LLAMA_LOGITS, file, scratch / "ids.npy", scratch / "logits.npy", "--float32"]
    done = subprocess.run(
        [str(LLAMA_PYTHON), *map(str, given)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: np.ndarray = np.load(scratch / "logits.npy")
    return found


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_weights_whose_rows_or_columns_the_converter_moved_stay_packed(kind, tmp_path):
    """Blocks of Q4_K have columns of several heads: the input of that linear layer is moved."""
    heads = {"linear_num_value_heads": 8, "linear_num_key_heads": 2, "linear_value_head_dim": 64}
    folder = build("qwen3_5_moe_text", tmp_path / "model", **WIDE, **heads)
    convert(folder, tmp_path / "packed.gguf", kind)
    wide = widen(tmp_path / "packed.gguf", tmp_path / "wide.gguf")
    ids = ids_of(20)
    x = torch.randn(3, 512)
    with torch.no_grad(), opened(tmp_path / "packed.gguf") as moe, opened(wide) as other:
        layer = moe.model.model.layers[0].linear_attn
        stock = other.model.model.layers[0].linear_attn
        kinds = {name: type(m) for name, m in layer.named_children()}
        assert distance(moe.model(ids).logits, other.model(ids).logits) < TOLERANCES[False]
        for name in ("in_proj_qkv", "in_proj_z", "out_proj"):
            assert torch.equal(layer.get_submodule(name).weight, stock.get_submodule(name).weight)
        assert distance(layer.out_proj(x), stock.out_proj(x)) < TOLERANCES[False]
    assert kinds["in_proj_qkv"] is PackedLinear
    assert kinds["in_proj_z"] is PackedLinear
    assert kinds["out_proj"] is ReorderedLinear


def test_layers_that_predict_further_ahead_are_left_out(tmp_path, caplog):
    """As in files of Qwen3.5, whose block_count counts them."""
    folder = build("qwen3_5_moe_text", tmp_path / "model")
    convert(folder, folder / "f32.gguf", "f32")
    kinds = [True, True, True, False, False]
    keys = {
        "qwen35moe.block_count": (T.UINT32, 5), "qwen35moe.nextn_predict_layers": (T.UINT32, 1),
        "qwen35moe.attention.recurrent_layers": kinds,
    }  # fmt: skip
    ahead = {
        name: np.ones(64, np.float32)
        for name in ("blk.4.attn_norm.weight", "blk.4.nextn.enorm.weight")
    }
    file = rewrite(folder / "f32.gguf", tmp_path / "m.gguf", keys, **ahead)
    ids = ids_of(20)
    with torch.no_grad(), caplog.at_level("INFO"), opened(file) as moe:
        found = moe.model(ids).logits
    with torch.no_grad(), opened(folder / "f32.gguf") as moe:
        assert torch.equal(found, moe.model(ids).logits)
    assert caplog.text.count("2 tensors of layers that predict further ahead") == 1
