"""A GGUF file behind the server."""

from __future__ import annotations

from pathlib import Path

from moe_infinity import MoE
from tests.server.serving import serving
from tools.convert_to_gguf import convert

DEMO = Path(__file__).parents[2] / "models" / "demo"


def test_a_file_is_served_as_its_checkpoint(tmp_path):
    convert(DEMO, tmp_path / "demo.gguf", "bf16")
    answers = []
    for model in (tmp_path / "demo.gguf", DEMO):
        with (
            MoE(model, device="cpu", host_memory="50%", exact=True) as moe,
            serving(moe, max_batch=1) as server,
            server.client() as client,
        ):
            answer = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "What is a fever?"}],
                max_tokens=8,
                temperature=0,
            )
            answers.append(answer.choices[0].message.content)
    assert answers[0] == answers[1] != ""
