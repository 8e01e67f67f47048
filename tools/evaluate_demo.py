"""Measure the loss of the demo model, and whether its routing depends on the text's domain.

    corpus/<domain>/valid.jsonl -> windows of 513 tokens -> loss, n-gram bounds, experts per token
                                -> evaluation.json, expert_use.png, the tables of README.md

    python tools/evaluate_demo.py --model models/demo --out models/demo --tokens-seen N --minutes M

Model and n-grams predict the same tokens, 2 to 513 of each window, from that window alone. The
n-grams are counted in the training split of all domains.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from demo_card import card_section, plot_expert_use, rewrite_card
from ngram_bounds import ngram_nats
from train_demo import SEQ_LEN, documents, packed_windows
from transformers import AutoModelForCausalLM, AutoTokenizer

# Suffixes: W windows, T tokens of one, L layers, K experts per token, E experts, D domains.
BATCH = 4  # windows per forward pass
STRETCH = 64  # tokens from which the domain is guessed by their experts
PROMPTS = {
    "English literature": "It was a cold evening in November, and the old gentleman",
    "French literature": "Le soir tombait sur la petite ville, et la jeune fille",
    "code": 'def sum_of_squares(numbers):\n  """\n  Write a function to',
}


@dataclass(frozen=True, slots=True)
class Scored:
    """Losses and routing of one pass over the windows of a domain."""

    nats_WT: np.ndarray  # of the model, per predicted token
    experts_WTLK: np.ndarray  # chosen when the token before it was read


def validation_windows(
    tokenizer: Any, corpus: Path, tokens_per_domain: int
) -> dict[str, np.ndarray]:
    """Windows of each domain, evenly spaced over its split, so that many documents count."""
    chosen = {}
    for domain, texts in documents(corpus, "valid").items():
        windows = packed_windows(tokenizer, {domain: texts})
        wanted = min(len(windows), max(2, tokens_per_domain // SEQ_LEN))
        chosen[domain] = windows[np.linspace(0, len(windows) - 1, wanted).astype(int)]
    return chosen


@torch.inference_mode()
def score(model: Any, windows: np.ndarray) -> Scored:
    nats = []
    experts = []
    for first in range(0, len(windows), BATCH):
        batch = torch.from_numpy(windows[first : first + BATCH].astype(np.int64))
        out = model(input_ids=batch[:, :-1], output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(out.logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        top_k = torch.stack(out.router_logits, dim=1).topk(model.config.num_experts_per_tok).indices
        nats.append(loss.view(len(batch), SEQ_LEN).numpy())
        experts.append(top_k.view(len(batch), SEQ_LEN, *top_k.shape[1:]).to(torch.uint8).numpy())
    return Scored(np.concatenate(nats), np.concatenate(experts))


# --- routing ---


def expert_counts(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """[..., T, L, K] -> how many of the T tokens chose each expert, [..., L, E]."""
    return (experts[..., None] == np.arange(num_experts, dtype=np.uint8)).sum(axis=(-4, -2))


def jensen_shannon_bits(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    def entropy(x: np.ndarray) -> np.ndarray:
        return -(x * np.log2(x, where=x > 0, out=np.zeros_like(x))).sum(-1)

    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


def adjacent_overlap(experts_WTLK: np.ndarray) -> float:
    """Share of its experts that a token has in common with the token before it."""
    same = experts_WTLK[:, :-1, :, :, None] == experts_WTLK[:, 1:, :, None, :]
    return float(same.sum(axis=(-1, -2)).mean() / experts_WTLK.shape[-1])


def domain_from_experts(first_DLE: np.ndarray, later: list[np.ndarray]) -> float:
    """How often naive Bayes names the domain of a stretch of tokens from its expert counts."""
    smoothed = first_DLE + 1
    log_shares_DX = np.log(smoothed / smoothed.sum(-1, keepdims=True)).reshape(len(later), -1)
    hits = []
    for domain_idx, counts_NLE in enumerate(later):
        guesses = (counts_NLE.reshape(len(counts_NLE), -1) @ log_shares_DX.T).argmax(-1)
        hits.append((guesses == domain_idx).mean())
    return float(np.mean(hits))


def routing_report(experts: dict[str, np.ndarray], num_experts: int) -> dict[str, Any]:
    """How experts differ between domains, between halves of a domain, and between tokens."""
    first = []
    later = []
    adjacent = []
    for chosen_WTLK in experts.values():
        windows, _, layers, top_k = chosen_WTLK.shape
        stretches = chosen_WTLK.reshape(-1, STRETCH, layers, top_k)
        counts = expert_counts(stretches, num_experts)
        half = windows // 2 * (SEQ_LEN // STRETCH)
        first.append(counts[:half].sum(0))
        later.append(counts[half:])
        adjacent.append(adjacent_overlap(chosen_WTLK))
    first_DLE = np.stack(first)
    later_DLE = np.stack([counts.sum(0) for counts in later])
    all_DLE = first_DLE + later_DLE
    p, q, use_DLE = (x / x.sum(-1, keepdims=True) for x in (first_DLE, later_DLE, all_DLE))
    divergence_DD = jensen_shannon_bits(p[:, None], q[None]).mean(-1)
    within = float(np.diag(divergence_DD).mean())
    between = float(divergence_DD[~np.eye(len(experts), dtype=bool)].mean())
    mean_LE = use_DLE.mean(0)
    return {
        "js_between_domains_bits": between,
        "js_within_domain_bits": within,
        "js_ratio": between / within,
        "stretch": STRETCH,
        "domain_from_stretch": domain_from_experts(first_DLE, later),
        "domain_chance": 1 / len(experts),
        "overlap_adjacent_tokens": float(np.mean(adjacent)),
        "overlap_same_domain": float(top_k * (use_DLE**2).sum(-1).mean()),
        "overlap_any_domain": float(top_k * (mean_LE**2).sum(-1).mean()),
        "overlap_uniform": top_k / num_experts,
        "busiest_expert_load": float(mean_LE.max(-1).mean() * num_experts),
        "idle_experts": int((mean_LE < 0.1 / num_experts).sum()),
        "num_experts_all": mean_LE.size,
        "specialised": most_specialised(use_DLE, list(experts)),
        "use": {d: u.tolist() for d, u in zip(experts, use_DLE, strict=True)},
    }


def most_specialised(use_DLE: np.ndarray, domains: list[str], top: int = 8) -> list[dict[str, Any]]:
    """Experts with the largest share of their use in one domain. All domains weigh the same."""
    part_DLE = use_DLE / use_DLE.sum(0).clip(min=1e-9)
    busy_LE = use_DLE.mean(0) >= 0.5 / use_DLE.shape[2]  # rare experts are specialised by accident
    part_LE = np.where(busy_LE, part_DLE.max(0), 0)
    rows = []
    for flat in part_LE.ravel().argsort()[::-1][:top]:
        layer_idx, expert_idx = (int(i) for i in np.unravel_index(flat, part_LE.shape))
        domain_idx = int(part_DLE[:, layer_idx, expert_idx].argmax())
        share = float(part_LE[layer_idx, expert_idx])
        row = {"layer_idx": layer_idx, "expert_idx": expert_idx, "domain": domains[domain_idx]}
        rows.append({**row, "part_of_its_use": share})
    return rows


# --- quality and samples ---


def continuations(model: Any, tokenizer: Any) -> dict[str, dict[str, str]]:
    samples = {}
    for name, prompt in PROMPTS.items():
        torch.manual_seed(0)
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(
            **inputs, max_new_tokens=60, do_sample=True, temperature=0.8, top_p=0.9, top_k=0
        )
        new = out[0, inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        samples[name] = {"prompt": prompt, "continuation": text}
    return samples


def quality(
    scored: dict[str, Scored],
    windows: dict[str, np.ndarray],
    bounds: dict[str, dict[str, float]],
    bytes_of_token: np.ndarray,
) -> dict[str, dict[str, float]]:
    """Losses by domain; in `all` every token weighs the same."""
    rows: dict[str, dict[str, float]] = {}
    for domain, part in scored.items():
        num_bytes = int(bytes_of_token[windows[domain][:, 1:]].sum())
        row = {"tokens": part.nats_WT.size, "bytes": num_bytes, "loss": float(part.nats_WT.mean())}
        rows[domain] = {**row, **bounds[domain]}
    tokens = [row["tokens"] for row in rows.values()]
    total = {name: sum(row[name] for row in rows.values()) for name in ("tokens", "bytes")}
    for name in ("loss", "unigram", "bigram", "trigram"):
        total[name] = float(np.average([row[name] for row in rows.values()], weights=tokens))
    rows["all"] = total
    for row in rows.values():
        row["perplexity"] = float(np.exp(row["loss"]))
        row["bits_per_byte"] = row["loss"] * row["tokens"] / row["bytes"] / np.log(2)
    return rows


def bytes_per_token(tokenizer: Any) -> np.ndarray:
    """Bytes of text per token id: byte-level BPE has one letter per byte, special tokens none."""
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return np.array([0 if t in tokenizer.all_special_tokens else len(t) for t in tokens])


def rounded(value: Any) -> Any:
    """The value with all floats in it rounded to five decimals."""
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return round(value, 5) if isinstance(value, float) else value


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    windows = validation_windows(tokenizer, args.corpus, args.tokens_per_domain)
    scored = {}
    for domain in windows:
        scored[domain] = score(model, windows[domain])
        print(f"{domain}: loss {scored[domain].nats_WT.mean():.3f}", flush=True)

    stream = packed_windows(tokenizer, documents(args.corpus, "train")).ravel()
    bounds = ngram_nats(stream, windows, model.config.vocab_size)
    experts = {domain: part.experts_WTLK for domain, part in scored.items()}
    return {
        "tokens_seen": args.tokens_seen,
        "training_minutes": args.minutes,
        "train_split_tokens": stream.size,
        "quality": quality(scored, windows, bounds, bytes_per_token(tokenizer)),
        "routing": routing_report(experts, model.config.num_experts),
        "samples": continuations(model, tokenizer),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("models/demo"), help="holds the card")
    parser.add_argument("--tokens-per-domain", type=int, default=40_000)
    parser.add_argument("--tokens-seen", type=int, required=True, help="as `--export` printed it")
    parser.add_argument("--minutes", type=float, required=True, help="as `--export` printed it")
    args = parser.parse_args()
    report = rounded(evaluate(args))
    plot_expert_use(report["routing"]["use"], args.out / "expert_use.png")
    rewrite_card(args.out / "README.md", card_section(report))
    lines = (f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in report.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (args.out / "evaluation.json").write_text(text, encoding="utf-8")
    routing = {k: v for k, v in report["routing"].items() if isinstance(v, (int, float))}
    print(json.dumps({**report["quality"]["all"], **routing, "seconds": report["seconds"]}))


if __name__ == "__main__":
    main()
