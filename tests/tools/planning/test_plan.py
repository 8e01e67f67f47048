"""`moe-infinity plan`: a page, one JSON object, and numbers that make sense for known models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moe_infinity.errors import CheckpointError
from moe_infinity.tools.planning import planner
from moe_infinity.tools.planning.fit import sizes_of
from moe_infinity.tools.planning.machine import parse_machine
from moe_infinity.tools.planning.page import ONE_GPU, page
from moe_infinity.tools.planning.planner import PlannedRun, make_plan, packed_sizes
from moe_infinity.tools.planning.speed import Constants
from tests.gguf_files import build
from tests.tools.planning.published import MODELS, hollow
from tools.convert_to_gguf import convert

TOLD = "ram=32GiB,disk=3GB/s,cores=8,memory=60GB/s,products=500GFLOP/s"
GIB = 2**30


def planned(sizes, machine=TOLD, **workload):
    return make_plan(sizes, parse_machine(machine), PlannedRun(**workload), Constants())


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """Sizes of a published model, by name; each is made once."""
    known = {}

    def found(name):
        if name not in known:
            known[name] = sizes_of(str(hollow(name, tmp_path_factory.mktemp("hollow"))))
        return known[name]

    return found


# published models


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models_are_those_of_their_cards(published, name):
    sizes = published(name)
    model = MODELS[name]
    embeddings = sizes.head_params  # as many as the head's
    whole = sizes.dense_params + sizes.head_params + embeddings
    whole += sizes.total_experts * sizes.expert_params
    assert whole / 1e9 == pytest.approx(model.params, rel=0.01)
    # some cards count the embeddings
    assert sizes.activated_params / 1e9 == pytest.approx(model.activated, rel=0.1)


def test_gpt_oss_has_its_experts_in_the_bits_that_were_published(published):
    sizes = published("gpt-oss-20b")
    assert sizes.packing == "mxfp4"
    assert 8 * sizes.stored_bytes / sizes.expert_params == pytest.approx(4.25, rel=0.01)


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("Qwen3-30B-A3B", 48 * 2 * 4 * 128 * 2),
        ("DeepSeek-V2-Lite", 27 * (512 + 64) * 2),
        ("DeepSeek-V3", 61 * (512 + 64) * 2),
    ],
)
def test_keys_and_values_grow_with_the_context(published, name, per_token):
    assert published(name).kv.of(1000) == 1000 * per_token


def test_layers_with_a_window_keep_no_more_than_it(published):
    per_layer = 2 * 8 * 64 * 2
    assert published("gpt-oss-20b").kv.of(1000) == 12 * per_layer * (1000 + 128)


def test_what_fits_is_faster_than_what_does_not(published):
    """On a PC with 32 GiB: two whole models, parts of the others, V3 not at all."""
    plans = {name: planned(published(name)) for name in MODELS}
    runs = {name: plan.outlook.fit.refusal is None for name, plan in plans.items()}
    assert runs == dict.fromkeys(MODELS, True) | {"DeepSeek-V3": False}
    whole = {name for name, plan in plans.items() if plan.outlook.fit.all_in_memory}
    assert whole == {"gpt-oss-20b", "DeepSeek-V2-Lite"}
    speeds = {name: plan.outlook.speed.tokens_per_s for name, plan in plans.items() if runs[name]}
    assert 10 < speeds["gpt-oss-20b"] < 40
    assert 1 < speeds["Qwen3-30B-A3B"] < 10
    assert speeds["Qwen3-235B-A22B"] < speeds["gpt-oss-120b"] < speeds["gpt-oss-20b"]


def test_a_large_server_holds_the_largest(published):
    plan = planned(published("DeepSeek-V3"), "ram=2TiB,disk=10GB/s,cores=64,memory=300GB/s")
    assert plan.outlook.fit.all_in_memory
    assert 2 < plan.outlook.speed.tokens_per_s < 10  # 37 billion parameters of 2 bytes


def test_a_gpu_makes_a_model_faster_than_the_cpu(published):
    sizes = published("Qwen3-30B-A3B")
    with_gpu = planned(sizes, f"{TOLD},gpu=24GiB,link=25GB/s")
    assert with_gpu.outlook.speed.tokens_per_s > planned(sizes).outlook.speed.tokens_per_s
    assert ONE_GPU in page(with_gpu)


def test_packed_experts_take_the_bytes_that_the_readme_says(published):
    found = dict(packed_sizes(published("Qwen3-30B-A3B")))
    assert list(found) == [name for name, *_ in planner.FORMS]
    whole = published("Qwen3-30B-A3B").expert_bytes
    assert whole / found["moe-infinity pack --experts int4"].expert_bytes == pytest.approx(
        3.6, abs=0.05
    )
    assert found["GGUF, Q8_0"].dense_bytes < published("Qwen3-30B-A3B").dense_bytes


def test_what_is_in_four_bits_already_has_no_variant(published):
    assert packed_sizes(published("gpt-oss-20b")) == []


# page and JSON


@pytest.mark.parametrize("machine", [TOLD, f"{TOLD},gpu=24GiB", "ram=2GiB", "ram=4TiB"])
@pytest.mark.parametrize("context", [4096, 10_000_000])
def test_a_page_fits_a_terminal_of_100_columns(published, machine, context):
    for name in ("Qwen3-30B-A3B", "gpt-oss-20b"):
        sizes = replace(published(name), model="Qwen/Qwen3-30B-A3B")
        text = page(planned(sizes, machine, context=context))
        assert max(map(len, text.splitlines())) <= 100


def test_a_page_names_what_was_assumed_and_the_source_of_the_hit_rate(published):
    text = page(planned(published("Qwen3-30B-A3B"), "ram=32GiB,disk=3GB/s"))
    assert "50 GB/s memory (assumed)" in text
    assert "5 GB/s new memory (assumed)" in text
    assert "3 GB/s random reads of the disk," in text
    assert "curve of DeepSeek-V2-Lite, recorded" in text


def test_terms_on_the_page_add_up_to_the_time(sizes, machine):
    plan = make_plan(sizes, machine, PlannedRun(), Constants())
    found = plan.outlook.speed.as_dict()
    for name in ("decode", "first_token_cold", "first_token_warm"):
        lanes = [sum(term["seconds"] for term in lane) for lane in found[name]["at_once"]]
        total = sum(term["seconds"] for term in found[name]["after_each_other"])
        total += max(lanes, default=0.0)
        assert found[name]["seconds"] == pytest.approx(total)
    assert len(found["first_token_warm"]["at_once"]) == 2
    assert found["tokens_per_s"] == pytest.approx(1 / found["decode"]["seconds"])


def test_a_model_that_does_not_fit_has_no_command_and_its_variants_are_shown(published):
    plan = planned(published("DeepSeek-V3"))
    text = page(plan)
    assert text.count("It does not fit: dense weights") == 1
    assert plan.commands == ()
    assert "Decoding" not in text
    assert "GGUF, Q4_K_M" in text


def test_a_model_of_the_hub_is_downloaded_first(sizes, machine):
    remote = replace(sizes, folder=None)
    plan = make_plan(remote, machine, PlannedRun(host_memory="2GB"), Constants())
    assert plan.commands[0] == "moe-infinity pull some/model"
    assert plan.commands[1].endswith("--host-memory 2GB")


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("A-Q4_K_M.gguf", "A-Q4_K_M.gguf"),
        ("Q4/A-00001-of-00003.gguf", "'Q4/A-*-of-00003.gguf'"),
    ],
)
def test_a_file_of_the_hub_is_downloaded_by_its_name(sizes, machine, file, include):
    remote = replace(sizes, folder=None, model=f"some/model/{file}")
    plan = make_plan(remote, machine, PlannedRun(), Constants())
    assert plan.commands[0] == f"moe-infinity pull some/model --include {include}"
    assert plan.commands[1].startswith("moe-infinity run some/model -p ")


def test_a_path_is_quoted_in_the_command(sizes, machine):
    spaced = replace(sizes, model="/tmp/packed 1")
    (run,) = make_plan(spaced, machine, PlannedRun(), Constants()).commands
    assert run.startswith("moe-infinity run '/tmp/packed 1' -p ")


# the command


def test_the_command_writes_a_page(command, tiny_checkpoint):
    outcome = command("plan", tiny_checkpoint, "--machine", TOLD)
    assert outcome.code == 0
    assert "It fits: all experts in memory." in outcome.out
    assert f"moe-infinity run {tiny_checkpoint}" in outcome.out


def test_a_gguf_file_that_does_not_say_all_is_planned_with_a_config(command, tmp_path):
    folder = build("deepseek_v2", tmp_path / "model")
    convert(folder, tmp_path / "model.gguf", "f32")
    file = str(tmp_path / "model.gguf")
    outcome = command("plan", file, "--config", str(folder), "--machine", TOLD)
    assert outcome.code == 0
    assert f"--config {folder}" in outcome.out


def test_a_table_that_is_looked_up_is_not_read_by_each_token(tmp_path):
    folder = build("qwen4_exp_text", tmp_path / "model", ngram_vocab_size_base=5000)
    convert(folder, tmp_path / "model.gguf", "f32")
    found = sizes_of(str(tmp_path / "model.gguf"))
    table_bytes = 4 * found.table_params
    assert found.table_params > 4 * 5000 * 16
    embedding_bytes = 4 * 128 * 64
    assert found.dense_bytes - found.step_dense_bytes == table_bytes + embedding_bytes
    q8 = dict(packed_sizes(found))["GGUF, Q8_0"]
    assert q8.dense_bytes > 8.5 / 8 * found.table_params


def test_the_command_writes_one_json_object(command, tiny_checkpoint):
    outcome = command("plan", tiny_checkpoint, "--machine", TOLD, "--json")
    found = json.loads(outcome.out)
    assert found.keys() == {
        "model", "machine", "prompt_tokens", "context_tokens", "fit", "hit_rates", "speed",
        "variants", "constants", "commands",
    }  # fmt: skip
    assert found["model"]["num_experts"] == 8
    assert found["machine"]["disk"] == 3e9
    assert found["machine"]["lockable"] is None
    assert found["fit"]["fits"] is True
    assert [tier["name"] for tier in found["fit"]["tiers"]] == ["host", "disk"]
    assert found["hit_rates"]["host"]["decode"] == 1.0
    assert found["speed"]["tokens_per_s"] > 0


def test_this_machine_is_measured_all_but_the_disk_with_quick(command, tiny_checkpoint):
    found = json.loads(command("plan", tiny_checkpoint, "--quick", "--json").out)["machine"]
    assert found["assumed"] == ["disk"]
    assert found["cores"] >= 1
    assert min(found["ram"], found["memory"], found["products"]) > 0


def test_the_disk_is_measured_where_the_model_lies(command, copy_of, tiny_checkpoint, monkeypatch):
    folder = copy_of(tiny_checkpoint)
    asked = []

    def measure(*args, **more):
        asked.append(args)
        return 5e8

    monkeypatch.setattr(planner, "measure_disk", measure)
    found = json.loads(command("plan", folder, "--json").out)["machine"]
    assert asked == [(folder, 3.0)]
    assert (found["disk"], found["assumed"]) == (5e8, [])


def test_a_disk_that_cannot_be_measured_is_assumed(command, tiny_checkpoint, monkeypatch, caplog):
    def fail(*args, **more):
        raise CheckpointError("it is read-only")

    monkeypatch.setattr(planner, "measure_disk", fail)
    found = json.loads(command("plan", tiny_checkpoint, "--json").out)["machine"]
    assert found["assumed"] == ["disk"]
    assert "it is read-only" in caplog.text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--machine", "rom=3"], "unknown 'rom'"),
        (["--machine", TOLD, "--host-memory", "much"], "is not a size"),
    ],
)
def test_wrong_options_are_errors(command, tiny_checkpoint, more, said):
    outcome = command("plan", tiny_checkpoint, *more)
    assert outcome.code == 1
    assert said in outcome.err


@pytest.mark.parametrize(
    ("budget", "said"), [("1B", "no expert has room"), ("40GiB", "more than is free")]
)
def test_a_budget_that_the_engine_refuses_does_not_fit(command, tiny_checkpoint, budget, said):
    outcome = command("plan", tiny_checkpoint, "--machine", TOLD, "--host-memory", budget)
    assert "It does not fit: " in outcome.out
    assert said in outcome.out
    assert "moe-infinity run" not in outcome.out


def test_a_wrong_path_is_an_error(command, tmp_path):
    outcome = command("plan", tmp_path / "absent", "--machine", TOLD)
    assert (outcome.code, outcome.out) == (1, "")
    assert "absent" in outcome.err
