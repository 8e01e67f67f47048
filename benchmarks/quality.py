"""What do fewer bits cost? Errors of weights and of layer outputs, perplexity, greedy tokens.

    python benchmarks/quality.py [--corpus ../shared/data/corpus]

The demo model, its experts packed in each format by `moe-infinity pack`, against its own bfloat16:
the mean relative error of the experts' weights and of what the MoE layers add to the residual
(Frobenius norms), perplexity on each domain's validation split (windows of 513 tokens, as
models/demo/evaluation.json), and how many of 64 greedy tokens equal those of bfloat16, by prompt.
Without the corpus, which a user's clone does not have, the README's text is read instead.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.utils import logging

from moe_infinity import MoE
from moe_infinity.quantize.pack import pack_checkpoint

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "demo"
FORMATS = {  # name -> options of pack
    "int8": {"experts": "int8"},
    "fp8": {"experts": "fp8"},
    "int4, groups of 32": {"experts": "int4"},
    "int4, groups of 32, nearest": {"experts": "int4", "rounding": "nearest"},
    "int4, groups of 128": {"experts": "int4", "group_size": 128},
}
WINDOW = 512
PROMPTS = (
    "It was a cold evening in November, and the old gentleman",
    "Le soir tombait sur la petite ville, et la jeune fille",
    "Question: If a train travels 60 km in 45 minutes, how far does it go in 2 hours?\nAnswer:",
    "def sum_of_squares(numbers):\n",
)


def windows(tokenizer: Any, corpus: Path, tokens_per_domain: int) -> dict[str, torch.Tensor]:
    """[windows, 513] token ids of each domain, evenly spaced over its validation split."""
    texts = {folder.name: folder / "valid.jsonl" for folder in sorted(corpus.glob("*/"))}
    texts = {name: file for name, file in texts.items() if file.exists()}
    chosen = {}
    for name, file in texts.items():
        lines = (json.loads(line)["text"] for line in file.read_text("utf-8").splitlines())
        ids = np.concatenate([[*tokenizer(text).input_ids, 0] for text in lines])
        cut = ids[: len(ids) // (WINDOW + 1) * (WINDOW + 1)].reshape(-1, WINDOW + 1)
        wanted = min(len(cut), max(2, tokens_per_domain // WINDOW))
        at = np.linspace(0, len(cut) - 1, wanted).astype(int)
        chosen[name] = torch.from_numpy(cut[at].astype(np.int64))
    if not chosen:
        print(f"no {corpus}/*/valid.jsonl: the README stands in for it")
        ids = tokenizer((ROOT / "README.md").read_text("utf-8"), return_tensors="pt").input_ids
        chosen["README"] = ids[:, : ids.shape[1] // (WINDOW + 1) * (WINDOW + 1)].view(
            -1, WINDOW + 1
        )
    return chosen


@torch.inference_mode()
def measure(folder: Path, texts: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Perplexity by domain, greedy tokens by prompt, and what each MoE layer gives for one text."""
    with MoE(folder, host_memory="100%", experts_implementation="grouped_mm") as moe:
        perplexity = {}
        for name, ids in texts.items():
            nats = []
            for batch in ids.split(4):
                logits = moe.model(batch[:, :-1], use_cache=False).logits
                nats.append(F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()))
            perplexity[name] = math.exp(float(torch.stack(nats).mean()))
        blocks = [layer.mlp for layer in moe.model.model.layers]
        inputs = torch.randn(64, moe.model.config.hidden_size, generator=seeded()).bfloat16()
        outputs = [block(inputs[None])[0].float() for block in blocks]
        tokens = []
        for prompt in PROMPTS:
            encoded = moe.tokenizer(prompt, return_tensors="pt")
            out = moe.generate(**encoded, max_new_tokens=64, do_sample=False)
            tokens.append(out[0, encoded.input_ids.shape[1] :].tolist())
        return {
            "perplexity": perplexity,
            "outputs": outputs,
            "tokens": tokens,
            "expert_bytes": moe.report().tiers[1].capacity_bytes,
        }


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def compared(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(found["outputs"], base["outputs"], strict=True)
    errors = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(y)) / len(y)
        for x, y in zip(found["tokens"], base["tokens"], strict=True)
    ]
    return {
        "share_of_bytes": found["expert_bytes"] / base["expert_bytes"],
        "layer_error": sum(errors) / len(errors),
        "equal_tokens": sum(same) / len(same),
        "perplexity_change": {
            name: value / base["perplexity"][name] - 1
            for name, value in found["perplexity"].items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=ROOT.parent / "shared" / "data" / "corpus")
    parser.add_argument("--tokens", type=int, default=20_000, help="per domain")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with MoE(MODEL) as moe:
        texts = windows(moe.tokenizer, args.corpus, args.tokens)
    base = measure(MODEL, texts)
    print("bfloat16 perplexity:", {k: round(v, 2) for k, v in base["perplexity"].items()})
    results = {}
    for name, options in FORMATS.items():
        with tempfile.TemporaryDirectory() as scratch:
            report = pack_checkpoint(str(MODEL), Path(scratch) / "packed", **options)
            found = compared(measure(Path(scratch) / "packed", texts), base)
        results[name] = {"weight_error": report.mean_error, **found}
        worst = max(found["perplexity_change"].values())
        print(
            f"{name:28} bytes {found['share_of_bytes']:5.1%}  weights {report.mean_error:6.2%}  "
            f"layers {found['layer_error']:6.2%}  perplexity at worst {worst:+6.2%}  "
            f"first tokens equal {found['equal_tokens']:4.0%}"
        )
    print(json.dumps({"benchmark": "quality", "formats": results}))


if __name__ == "__main__":
    main()
