"""The generated part of the demo model's card: tables, samples and the picture of expert use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

BEGIN = "<!-- evaluation:begin -->"
END = "<!-- evaluation:end -->"
LOSS_HEADER = "domain | tokens | loss | perplexity | bits per byte | trigram | bigram | unigram"
SECTION = """
Seen in training: {tokens_seen:,} tokens in {training_minutes:g} minutes \
(the training split holds {train_split_tokens:,} tokens).

### Validation loss

Nats per token on the validation split, windows of 512 tokens, weights read as float32. The n-gram \
models (unigram with add-one, bigram and trigram with absolute discounting, interpolated) counted \
the whole training split and predict exactly the same tokens.

{losses}

### Does the routing mean something?

| measure | value | to compare with |
| --- | --- | --- |
| divergence of expert use between two domains (Jensen-Shannon, bits, mean over layers) \
| {js_between_domains_bits:.4f} | {js_within_domain_bits:.4f} between two halves of one domain \
(different documents): {js_ratio:.1f} times less |
| domain guessed from the experts of {stretch} tokens (naive Bayes) | {domain_from_stretch:.1%} \
| {domain_chance:.1%} by chance |
| experts shared by adjacent tokens | {overlap_adjacent_tokens:.3f} | {overlap_same_domain:.3f} \
two tokens of one domain, {overlap_any_domain:.3f} of any domain, {overlap_uniform:.3f} uniform |
| load of the busiest expert of a layer (1 = uniform) | {busiest_expert_load:.2f} | |
| experts used less than a tenth of uniform | {idle_experts} | of {num_experts_all} |

The most specialised experts (all domains weighing the same):

{specialised}

![Use of every expert, by layer and domain](expert_use.png)

### Samples

Temperature 0.8, top-p 0.9, seed 0, 60 tokens; the prompt ends at ▸.

{samples}
"""


def table(header: str, rows: list[str]) -> str:
    rule = "|" + " --- |" * (header.count("|") + 1)
    return "\n".join([f"| {header} |", rule, *(f"| {row} |" for row in rows)])


def card_section(report: dict[str, Any]) -> str:
    losses = [
        f"{name} | {r['tokens']:,} | {r['loss']:.3f} | {r['perplexity']:.1f} | "
        f"{r['bits_per_byte']:.3f} | {r['trigram']:.3f} | {r['bigram']:.3f} | {r['unigram']:.3f}"
        for name, r in report["quality"].items()
    ]
    routing = report["routing"]
    specialised = [
        f"{r['layer_idx']} | {r['expert_idx']} | {r['domain']} | {r['part_of_its_use']:.0%}"
        for r in routing["specialised"]
    ]
    samples = [
        f"{name}:\n\n````text\n{s['prompt']} ▸{s['continuation']}\n````"
        for name, s in report["samples"].items()
    ]
    texts = {
        "losses": table(LOSS_HEADER, losses),
        "specialised": table("layer | expert | domain | part of its use", specialised),
        "samples": "\n\n".join(samples),
    }
    return SECTION.format(**{**report, **routing, **texts})


def rewrite_card(card: Path, section: str) -> None:
    before, _, rest = card.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{card} has no section between {BEGIN} and {END}")
    card.write_text(f"{before}{BEGIN}\n{section}{END}{after}", encoding="utf-8")


def plot_expert_use(use: dict[str, list[list[float]]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # the backend has to be chosen first

    rows = (len(use) + 1) // 2
    figure, axes = plt.subplots(
        rows, 2, figsize=(9, 1.7 * rows + 0.6), sharex=True, sharey=True, layout="constrained"
    )
    image = None
    for axis, (domain, use_LE) in zip(axes.flat, use.items(), strict=False):
        relative = np.array(use_LE) * len(use_LE[0])
        image = axis.imshow(relative, vmin=0, vmax=4, cmap="viridis", aspect="auto")
        axis.set_title(domain, fontsize=10)
        axis.set_yticks(range(0, len(use_LE), 3))
    figure.supxlabel("expert", fontsize=10)
    figure.supylabel("layer", fontsize=10)
    label = "use, 1 = uniform"
    figure.colorbar(image, ax=axes, label=label, shrink=0.6, extend="max")
    figure.savefig(path, dpi=100)
    plt.close(figure)
