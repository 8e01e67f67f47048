"""What joins a batch and leaves it: attention caches that slide, recurrent states, latent ones.

Every architecture the README names, tiny and random: alone in the engine a sequence has the tokens
of generate(); among others, the logits it has alone, to a float tolerance.
"""

from __future__ import annotations

import pytest

from moe_infinity import MoE, UnsupportedModelError
from moe_infinity.memory import room as room_module
from tests.conftest import save_tokenizer
from tests.server.driving import Client, assert_same_answer, generated, make_engine, run_all
from tests.sweep import discover, tiny

pytestmark = pytest.mark.arithmetic

NAMED = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "OlmoeForCausalLM": "olmoe",
    "DbrxForCausalLM": "dbrx",
    "Glm4MoeForCausalLM": "glm4_moe",
    "InklingForCausalLM": "inkling",
}
PROMPTS = [[7, 20, 33, 46], list(range(5, 45)), [99], list(range(60, 80))]
LENGTHS = [20, 6, 18, 11]  # the window of those that slide is 16


FAST = ("MixtralForCausalLM", "Qwen3NextForCausalLM", "GptOssForCausalLM")
ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in NAMED]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ALL)
def test_a_sequence_has_the_same_tokens_alone_and_among_others(name, tmp_path):
    (architecture,) = [a for a in discover.architectures_in(NAMED[name]) if a.name == name]
    tiny.tiny_model(architecture).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with MoE(tmp_path, host_memory="50%", dtype="float32") as moe:
        alone = make_engine(moe, max_batch=1)
        together = make_engine(moe, max_batch=3)
        singles = []
        clients = []
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
            singles.append(Client(alone, prompt, max_new_tokens=length))
            clients.append(Client(together, prompt, max_new_tokens=length))
            together.step()
            together.step()
        run_all(alone, *singles)
        run_all(together, *clients)
        for single, client, length in zip(singles, clients, LENGTHS, strict=True):
            expected = generated(moe, single.prompt_ids, max_new_tokens=length)
            assert single.token_ids == expected
            assert_same_answer(client, single)


@pytest.mark.parametrize(
    ("name", "folder", "reason"),
    [
        ("DeepseekV32ForCausalLM", "deepseek_v32", "--max-batch 1"),
        ("MiniMaxForCausalLM", "minimax", "cache of its own"),
        ("DiffusionGemmaForBlockDiffusion", "diffusion_gemma", "generate\\(\\) of its own"),
    ],
)
def test_a_model_whose_sequences_cannot_run_together_is_refused(name, folder, reason, tmp_path):
    (architecture,) = [a for a in discover.architectures_in(folder) if a.name == name]
    tiny.tiny_model(architecture).save_pretrained(tmp_path)
    with (
        MoE(tmp_path, host_memory="50%", dtype="float32") as moe,
        pytest.raises(UnsupportedModelError, match=reason),
    ):
        make_engine(moe)


WINDOW = 80  # more than a block of the prefix cache, less than what was read before the last block


@pytest.mark.sample(2)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_windows_of_which_prefixes_are_kept_attend_in_blocks_of_a_prompt(
    kv_dtype, tmp_path, monkeypatch
):
    (architecture,) = discover.architectures_in("gpt_oss")
    config = tiny.tiny_config(architecture)
    config.sliding_window = WINDOW
    tiny.random_model(architecture, config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    first = [(7 * i + i // 5) % 97 + 3 for i in range(200)]
    second = first[:100] + first[:130]
    with MoE(tmp_path, host_memory="50%", dtype="float32", kv_dtype=kv_dtype) as moe:
        expected = []
        for sizes in ((1 << 20,), (40,)):
            monkeypatch.setattr(room_module, "BLOCK_SIZES", sizes)
            engine = make_engine(moe, max_batch=2, prefix_cache="50%")
            clients = [Client(engine, ids, max_new_tokens=6) for ids in (first, second)]
            for client in clients:
                run_all(engine, client)
                assert client.error is None
            expected.append(clients)
        blocks = moe.engine._blocks
        assert blocks is not None
        assert blocks._num_cut > 0
        for found, wanted in zip(*expected, strict=True):
            if kv_dtype == "auto":
                assert_same_answer(found, wanted)
            assert found.token_ids == wanted.token_ids
        assert clients[1].running.num_cached > 0
