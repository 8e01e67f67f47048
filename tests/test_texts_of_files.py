"""Texts of files are escaped wherever they are printed or logged: no terminal obeys them."""

from __future__ import annotations

import json
import logging
import signal

import pytest

import moe_infinity.errors
from moe_infinity import CheckpointError, MoE
from moe_infinity.cli import app as app_module
from moe_infinity.cli.terminal import PrintableRecord
from moe_infinity.errors import MoEInfinityError
from tests.conftest import save_tokenizer

EVIL = "\x1b[2J\x1b]0;title\x07\u202e\x9b31m\r"
SEEN = r"\x1b[2J\x1b]0;title\x07\u202e\x9b31m\r"
OURS = [
    each
    for each in vars(moe_infinity.errors).values()
    if isinstance(each, type) and issubclass(each, MoEInfinityError)
]


@pytest.mark.parametrize("error", OURS)
def test_every_error_of_ours_shows_what_a_terminal_would_obey(error):
    assert str(error(f"folder: {EVIL}\nhint: none")) == f"folder: {SEEN}\nhint: none"
    assert str(error()) == ""


def test_lines_of_a_log_show_what_a_terminal_would_obey(capsys, caplog):
    stock, on_ctrl_c = logging.getLogRecordFactory(), signal.getsignal(signal.SIGINT)

    def command() -> None:
        logging.getLogger("another.package").warning("%s: %d", EVIL, 3)

    try:
        app_module.run_app(command)  # type: ignore[arg-type]
    finally:
        logging.setLogRecordFactory(stock)
        signal.signal(signal.SIGINT, on_ctrl_c)  # a command ignores it at its end
    assert caplog.messages == [f"{SEEN}: 3"]
    assert isinstance(caplog.records[0], PrintableRecord)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", {"model_type": EVIL}),
        ("config.json", {EVIL: 10**30}),
        ("config.json", {"dtype": EVIL}),
        ("config.json", {"quantization_config": {"quant_method": EVIL}}),
        ("generation_config.json", {"temperature": EVIL}),
        ("model.safetensors.index.json", {"metadata": {}, "weight_map": {"a": EVIL}}),
    ],
    ids=str,
)  # fmt: skip
def test_a_folder_whose_files_hold_control_characters(tiny_checkpoint, copy_of, name, content):
    folder = copy_of(tiny_checkpoint)
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | content))
    if "index" in name:
        (folder / "model.safetensors").unlink()
    with pytest.raises(MoEInfinityError) as raised, MoE(folder):
        pass
    assert not set(EVIL) - set("[2J]0;title31m") & set(str(raised.value))


def test_a_tokenizer_whose_files_hold_control_characters(tiny_checkpoint, copy_of):
    folder = copy_of(tiny_checkpoint)
    save_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens": EVIL}))
    with MoE(folder) as moe, pytest.raises(CheckpointError, match=r"x1b\[2J") as raised:
        moe.tokenizer  # noqa: B018
    assert "\x1b" not in str(raised.value)
