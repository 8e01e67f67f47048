"""Write the table of docs/gguf.md: which architectures load, and what they need.

python -m scripts.gguf_table
"""

from __future__ import annotations

from pathlib import Path

import transformers

from moe_infinity.gguf.fields import METADATA
from tests.gguf_files import class_for
from tests.gguf_models import MODELS
from tools.convert_to_gguf import ARCHITECTURES

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "gguf.md"
BEGIN = "<!-- models: begin (python -m scripts.gguf_table) -->\n"
END = "<!-- models: end -->"
# What files of an architecture, or of one of its models, say of their tokenizer, by llama.cpp's
# converter.
TOKENIZERS = {
    "cohere2moe": ("cohere2moe",), "deepseek32": ("deepseek-v3",), "hy_v3": ("hunyuan",),
    "laguna": ("laguna",), "mellum": ("mellum2",), "mimo2": ("qwen2",),
    "deepseek_v2": ("deepseek-llm",), "glm4_moe_lite": ("glm4",), "solar_open": ("solar-open",),
    "afmoe": ("afmoe",), "exaone-moe": ("exaone-moe",), "glm-dsa": ("glm4",), "jamba": ("llama",),
    "mistral4": ("tekken",),
    "kimi-linear": ("kimi-k2",), "glm5-next": ("glm4",), "qwen3vlmoe": ("qwen2",),
    "deepseek2": ("deepseek-v3", "kimi-k2"), "dots1": ("qwen2",), "ernie4_5-moe": ("llama",),
    "gemma4": ("gemma4",), "glm4moe": ("glm4",), "gpt-oss": ("gpt-4o",),
    "granitehybrid": ("dbrx",), "granitemoe": ("refact",), "hunyuan-moe": ("hunyuan",),
    "lfm2moe": ("lfm2",), "llama": ("llama",), "llama4": ("llama4",),
    "minimax-m2": ("minimax-m2",), "nemotron_h_moe": ("pixtral",), "olmoe": ("olmo",),
    "phimoe": ("llama",), "qwen2moe": ("qwen2",), "qwen35moe": ("qwen35",),
    "qwen3moe": ("qwen2",), "qwen3next": ("qwen2",), "qwen4exp": ("qwen35",),
    "step35": ("probably deepseek-v3",),
    "deepseek4": ("probably deepseek-v3",), "minimax-m3": ("probably minimax-m2",),
}  # fmt: skip


# What a comparison has shown that llama.cpp computes otherwise; the page says why.
DIFFERENCES = {
    "deepseek_v32": "up to `index_topk` tokens",
    "deepseek_v4": "up to 4 `index_topk` tokens",
    "glm5_next": "up to `index_topk` tokens",
    "glm_moe_dsa": "up to `index_topk` tokens",
    "gpt_oss": "but for YaRN",
    "laguna": "but for a factor of YaRN",
    "granitemoehybrid": "with one group of Mamba",
    "mellum": "with one `rope_theta`",
    "mistral4": "up to the context of training",
    "phimoe": "no: other norms and routing",
}


def table() -> str:
    """Of the models that tests/test_gguf.py compares with transformers."""
    lines = [
        "| `general.architecture` | class | config | as llama.cpp | tokenizer |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(MODELS, key=lambda name: (ARCHITECTURES[name], name)):
        architecture = ARCHITECTURES[name]
        config_class = transformers.CONFIG_MAPPING[name]
        model_class = class_for(config_class).__name__
        cells = (
            architecture,
            model_class,
            "file" if architecture in METADATA else "`--config`",
            DIFFERENCES.get(name, "yes"),
            ", ".join(TOKENIZERS.get(name) or TOKENIZERS[architecture]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    content = GUIDE.read_text("utf-8")
    before, _, rest = content.partition(BEGIN)
    _, _, after = rest.partition(END)
    GUIDE.write_text(before + BEGIN + table() + END + after, "utf-8")


if __name__ == "__main__":
    main()
