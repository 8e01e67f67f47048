"""What do keys and values in 8 bits cost? Perplexity, differences of logits, greedy tokens.

    python -m benchmarks.kv_quality [--corpus ../shared/data/corpus]

The demo model with `kv_dtype` int8 and fp8 against its own bfloat16: perplexity on each domain's
validation split, windows of 513 tokens as benchmarks/quality.py takes them, each in one pass;
the root mean square and the largest difference of a logit, as shares of the root mean square of
all logits, in that pass and token by token behind a prompt of 64 (the first windows only); and how
many of 64 greedy tokens equal those of bfloat16, by prompt.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers.utils import logging

from benchmarks.quality import MODEL, PROMPTS, ROOT, windows
from moe_infinity import MoE
from moe_infinity.architectures.attention_inputs import cache_parameter
from moe_infinity.kernels.kv_layers import new_cache

PROMPT = 64  # tokens before those that are decoded one by one
KV_DTYPES = ("auto", "int8", "fp8")


@torch.no_grad()
def measure(kv_dtype: str, texts: dict[str, torch.Tensor], num_decoded: int) -> dict[str, Any]:
    """Perplexity by domain, logits of passes and of decode steps, and greedy tokens by prompt."""
    with MoE(MODEL, kv_dtype=kv_dtype, preload="wait") as moe:
        name = cache_parameter(moe.model.forward)

        def logits_of(ids: torch.Tensor, cache: Any) -> torch.Tensor:
            logits: torch.Tensor = moe.model(ids, **{name: cache}).logits
            return logits.float()

        def fresh() -> Any:
            return new_cache(moe.model.config, kv_dtype)

        perplexity = {}
        passes = []
        for domain, ids in texts.items():
            nats = []
            for window in ids.split(1):
                logits = logits_of(window[:, :-1], fresh())
                nats.append(F.cross_entropy(logits[0], window[0, 1:]))
                passes.append(logits[0])
            perplexity[domain] = math.exp(float(torch.stack(nats).mean()))
        steps = []
        for ids in texts.values():
            cache = fresh()
            logits_of(ids[:1, :PROMPT], cache)
            for at in range(PROMPT, PROMPT + num_decoded):
                steps.append(logits_of(ids[:1, at : at + 1], cache)[0])
        tokens = []
        for prompt in PROMPTS:
            encoded = moe.tokenizer(prompt, return_tensors="pt")
            out = moe.generate(**encoded, max_new_tokens=64, do_sample=False)
            tokens.append(out[0, encoded.input_ids.shape[1] :].tolist())
        return {
            "perplexity": perplexity,
            "passes": passes,
            "steps": steps,
            "tokens": tokens,
            "token_bytes": moe.report().kv.per_token,
        }


def differences(found: list[torch.Tensor], base: list[torch.Tensor]) -> dict[str, float]:
    """Shares of the root mean square of all logits."""
    count = sum(each.numel() for each in base)
    size = math.sqrt(sum(float(each.square().sum()) for each in base) / count)
    squares = 0.0
    largest = 0.0
    for one, other in zip(found, base, strict=True):
        squares += float((one - other).square().sum())
        largest = max(largest, float((one - other).abs().max()))
    return {"rms": math.sqrt(squares / count) / size, "largest": largest / size}


def compared(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(y)) / len(y)
        for x, y in zip(found["tokens"], base["tokens"], strict=True)
    ]
    return {
        "token_bytes": found["token_bytes"],
        "pass": differences(found["passes"], base["passes"]),
        "decode": differences(found["steps"], base["steps"]),
        "equal_tokens": sum(same) / len(same),
        "perplexity_change": {
            name: value / base["perplexity"][name] - 1
            for name, value in found["perplexity"].items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=ROOT.parent / "shared" / "data" / "corpus")
    parser.add_argument("--tokens", type=int, default=4_000, help="per domain")
    parser.add_argument("--decoded", type=int, default=100, help="tokens per domain, one by one")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with MoE(MODEL) as moe:
        texts = windows(moe.tokenizer, args.corpus, args.tokens)
    base = measure("auto", texts, args.decoded)
    print("bfloat16 perplexity:", {k: round(v, 2) for k, v in base["perplexity"].items()})
    results = {}
    for kv_dtype in KV_DTYPES[1:]:
        results[kv_dtype] = found = compared(measure(kv_dtype, texts, args.decoded), base)
        changes = found["perplexity_change"].values()
        print(
            f"{kv_dtype:5} {found['token_bytes']:6,} of {base['token_bytes']:,} bytes a token  "
            f"perplexity {sum(changes) / len(changes):+.3%}, at worst {max(changes):+.3%}  "
            f"logits of a pass: RMS {found['pass']['rms']:.2%}, largest "
            f"{found['pass']['largest']:.1%}; decoding: RMS {found['decode']['rms']:.2%}, largest "
            f"{found['decode']['largest']:.1%}  first tokens equal {found['equal_tokens']:.0%}"
        )
    print(json.dumps({"benchmark": "kv_quality", "kv_dtypes": results}))


if __name__ == "__main__":
    main()
