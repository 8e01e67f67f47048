"""Write the table of docs/gguf.md: which architectures load, and what they need.

python -m scripts.gguf_table
"""

from __future__ import annotations

from pathlib import Path

import transformers

from moe_infinity.checkpoint.gguf_architectures import KNOWN
from tests.gguf_files import MODELS
from tools.convert_to_gguf import ARCHITECTURES

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "gguf.md"
BEGIN = "<!-- models: begin (python -m scripts.gguf_table) -->\n"
END = "<!-- models: end -->"


def table() -> str:
    """Of the models that tests/test_gguf.py compares with transformers."""
    lines = ["| `general.architecture` | class | config |", "|---|---|---|"]
    for name in sorted(MODELS, key=lambda name: (ARCHITECTURES[name], name)):
        architecture = ARCHITECTURES[name]
        config_class = transformers.CONFIG_MAPPING[name]
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__name__
        metadata = KNOWN[architecture].metadata
        is_enough = metadata is not None and metadata.model_type == name
        config = "file" if is_enough else "`--config`"
        lines.append(f"| {architecture} | {model_class} | {config} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    content = GUIDE.read_text("utf-8")
    before, _, rest = content.partition(BEGIN)
    _, _, after = rest.partition(END)
    GUIDE.write_text(before + BEGIN + table() + END + after, "utf-8")


if __name__ == "__main__":
    main()
