"""Train the bundled demo model: a small Qwen3-MoE whose routing depends on the text.

    corpus/<domain>/train.jsonl -> BPE tokenizer -> packed windows of 513 tokens
                                -> Muon and AdamW -> models/demo

    python tools/train_demo.py --minutes 100 --work-dir runs/demo  # again: resumes
    python tools/train_demo.py --export models/demo --work-dir runs/demo

A run takes a number of minutes of training time, and the learning rate follows that time (warm-up,
flat, linear decay): so training is complete on any machine. The same command resumes a run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ExpertsInterface

VOCAB_SIZE = 6144
SEQ_LEN = 512
BATCH = 8  # windows per step: 4,096 tokens
ADAMW_LR = 3e-3
MUON_LR = 0.02
BALANCE_WEIGHT = 0.01  # of the load-balancing loss, per layer over the whole mixed-domain batch
SPECIAL = ["<|endoftext|>", "<|pad|>"]
# The question-and-answer domains of the corpus are written this way, so chat follows it.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}Answer: {{ m['content'] }}\n\n"
    "{% else %}Question: {{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


def demo_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=192, intermediate_size=384, num_hidden_layers=10,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, num_experts=32,
        num_experts_per_tok=4, moe_intermediate_size=56, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0, pad_token_id=1, use_cache=True,
    )  # fmt: skip


def documents(corpus: Path, split: str) -> dict[str, list[str]]:
    """Domain -> texts, for every domain folder of the corpus."""
    files = sorted(corpus.glob(f"*/{split}.jsonl"))
    if not files:
        raise SystemExit(f"no */{split}.jsonl below {corpus}")
    return {f.parent.name: [json.loads(x)["text"] for x in f.open(encoding="utf-8")] for f in files}


def train_tokenizer(texts: dict[str, list[str]]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = (t for group in texts.values() for t in group[:: max(1, len(group) // 700)])
    bpe.train_from_iterator(sample, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[1],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = 1024
    tokenizer.padding_side = "left"
    return tokenizer


def packed_windows(tokenizer: PreTrainedTokenizerFast, texts: dict[str, list[str]]) -> np.ndarray:
    """All documents, each followed by end-of-text, as uint16 windows [windows, SEQ_LEN + 1]."""
    windows = []
    for group in texts.values():
        stream: list[int] = []
        for ids in tokenizer.backend_tokenizer.encode_batch(group):
            stream += ids.ids + [0]
        usable = len(stream) // (SEQ_LEN + 1) * (SEQ_LEN + 1)
        windows.append(np.array(stream[:usable], dtype=np.uint16).reshape(-1, SEQ_LEN + 1))
    return np.concatenate(windows)


def sorted_experts(self, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
    """The experts' output, with tokens sorted by expert and one matmul per expert.

    With `unbind` the backward pass makes no full-size zeros.
    """
    order = top_k_index_TK.flatten().argsort(stable=True)
    token = order // top_k_index_TK.shape[1]
    counts = torch.bincount(top_k_index_TK.flatten(), minlength=self.num_experts).tolist()
    rows = x_TD[token].split(counts)
    outs = []
    for x, gate_up, down in zip(
        rows, self.gate_up_proj.unbind(0), self.down_proj.unbind(0), strict=True
    ):
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        outs.append(F.linear(F.silu(gate) * up, down))
    y = torch.cat(outs) * top_k_weights_TK.flatten()[order, None]
    return torch.zeros_like(x_TD).index_add_(0, token, y)


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """The mean of each layer's Switch-style balance loss, so that every layer is balanced."""
    losses = []
    for logits in router_logits:
        probs = logits.float().softmax(-1)
        picked = torch.zeros_like(probs).scatter_(1, probs.topk(top_k).indices, 1.0)
        losses.append((picked.mean(0) * probs.mean(0)).sum() * probs.shape[1] / top_k)
    return torch.stack(losses).mean()


def learning_rate_factor(progress: float) -> float:
    """Warm-up over 1.5 %, flat, linear decay to 2 % over the last 50 % of the time."""
    return min(progress / 0.015 + 0.01, 1.0, max((1 - progress) / 0.5, 0.02))


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, matrix by matrix (K. Jordan, 2024: Newton-Schulz).

    For hidden matrices and stacks of them [E, rows, columns]; torch's own Muon takes no stacks.
    """

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                average.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalized(param.grad.lerp(average, group["momentum"]))
                rows, columns = param.shape[-2:]
                param.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Nearly the closest matrix [..., rows, columns] whose singular values are all 1."""
    a, b, c = 3.4445, -4.7750, 2.0315  # the quintic of the source above
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def build_optimizers(model: Qwen3MoeForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers; AdamW for embedding, routers and norms."""
    hidden = []
    other = []
    for name, param in model.named_parameters():
        is_hidden = param.ndim > 1 and "embed" not in name and ".gate.weight" not in name
        (hidden if is_hidden else other).append(param)
    adamw = torch.optim.AdamW(other, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [Muon(hidden, lr=MUON_LR), adamw]


def build_model() -> Qwen3MoeForCausalLM:
    ExpertsInterface.register("train_sorted", sorted_experts)
    torch.manual_seed(0)
    config = demo_config()
    config._experts_implementation = "train_sorted"
    model = Qwen3MoeForCausalLM(config).float()
    # The fused op is several times faster to train with, same mathematics.
    norm_class = type(model.model.norm)
    norm_class.forward = lambda self, x: F.rms_norm(
        x, (x.shape[-1],), self.weight, self.variance_epsilon
    )
    return model


def prepare(args: argparse.Namespace) -> np.ndarray:
    """The packed windows. Made once, with the tokenizer, and kept in the work folder."""
    packed = args.work_dir / "train.npy"
    if not packed.exists():
        texts = documents(args.corpus, "train")
        tokenizer = train_tokenizer(texts)
        tokenizer.save_pretrained(args.work_dir / "tokenizer")
        windows = packed_windows(tokenizer, texts)
        np.random.default_rng(0).shuffle(windows)
        np.save(packed, windows)
    return np.load(packed)


def train(args: argparse.Namespace) -> None:
    args.work_dir.mkdir(parents=True, exist_ok=True)
    windows = prepare(args)
    model = build_model().to(args.device)
    optimizers = build_optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    step = 0
    seconds = 0.0
    checkpoint = args.work_dir / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=args.device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved_state)
        step = state["step"]
        seconds = state["seconds"]
    print(
        f"{len(windows):,} windows of {SEQ_LEN} tokens, from step {step}, "
        f"{seconds / 60:.1f} min done",
        flush=True,
    )

    saved = time.monotonic()
    while (progress := seconds / (60 * args.minutes)) < 1.0:
        started = time.monotonic()
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * learning_rate_factor(progress)
        rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(windows)
        batch = torch.from_numpy(windows[rows].astype(np.int64)).to(args.device)
        out = model(input_ids=batch[:, :-1], output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(out.logits.flatten(0, 1), batch[:, 1:].flatten())
        balance = balance_loss(out.router_logits, model.config.num_experts_per_tok)
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        took = time.monotonic() - started
        seconds += took
        if not math.isfinite(loss.item()):
            raise SystemExit(
                f"loss is {loss.item()} at step {step}: start again from the last checkpoint"
            )
        if step % 20 == 0:
            print(
                f"step {step} loss {loss.item():.3f} balance {balance.item():.3f} "
                f"lr x{learning_rate_factor(progress):.2f} {BATCH * SEQ_LEN / took:.0f} tok/s "
                f"{seconds / 60:.1f} min",
                flush=True,
            )
        if time.monotonic() - saved > 240 or seconds >= 60 * args.minutes:
            save_checkpoint(checkpoint, model, optimizers, step, seconds)
            saved = time.monotonic()


def save_checkpoint(
    path: Path,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    seconds: float,
) -> None:
    """Write a checkpoint beside the last one and rename it, so that a kill leaves one complete."""
    partial = path.with_suffix(".partial")
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "seconds": seconds,
    }
    torch.save(state, partial)
    os.replace(partial, path)


def export(args: argparse.Namespace) -> None:
    """Write the last checkpoint in bfloat16 as a Hugging Face folder."""
    state = torch.load(args.work_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    model = build_model()
    model.load_state_dict(state["model"])
    model.to(torch.bfloat16).save_pretrained(args.export)
    PreTrainedTokenizerFast.from_pretrained(args.work_dir / "tokenizer").save_pretrained(
        args.export
    )
    tokens = state["step"] * BATCH * SEQ_LEN
    print(
        f"step {state['step']}, {tokens:,} tokens, {state['seconds'] / 60:.1f} min -> {args.export}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--work-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument(
        "--minutes", type=float, default=100, help="training time in all, earlier runs counted in"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--export", type=Path, help="write the last checkpoint to this folder and stop"
    )
    args = parser.parse_args()
    export(args) if args.export else train(args)


if __name__ == "__main__":
    main()
