"""What does the prefix cache of the server save in a conversation that grows?

    python tools/make_random_checkpoint.py runs/two --gib 2 --tokenizer models/demo
    python benchmarks/conversation.py runs/two --tokens 6000 --host-memory 1GiB

Turn by turn, with the prefix cache and without it in alternation: seconds to the first token, and
bytes read of experts. Each prompt is the one before, its answer and new text. Answers are greedy.
With --dtype float32 they have to be equal.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from moe_infinity import MoE
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.sampling import Sampling
from moe_infinity.server.sequences import Output, Request

TEXT = Path(__file__).resolve().parents[1] / "notes" / "log.md"
NUM_ANSWER = 16  # tokens
CHOSEN = Sampling(temperature=0.0, num_logprobs=0)  # outputs then carry token ids


def answer(engine: Engine, moe: MoE, prompt_ids: list[int]) -> dict[str, Any]:
    """One turn, stepped here: how long the first token took, what was read, the answer."""
    outputs: list[Output] = []
    request = Request(prompt_ids=prompt_ids, max_new_tokens=NUM_ANSWER, sampling=CHOSEN)
    before = moe.report().prefill.bytes_read
    began = time.perf_counter()
    engine.submit([engine.running(request, outputs.append)])
    first_s = read = None
    while not (outputs and outputs[-1].is_last):
        engine.step()
        if first_s is None and outputs:
            first_s = time.perf_counter() - began
            read = moe.report().prefill.bytes_read - before
    if outputs[-1].error is not None:
        raise outputs[-1].error
    ids = [token.chosen.token_id for output in outputs for token in output.tokens]
    return {"s": first_s, "read": read, "cached": outputs[-1].num_cached, "ids": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=6000, help="of the last prompt")
    parser.add_argument("--host-memory", default=None)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    with MoE(args.model, host_memory=args.host_memory, dtype=args.dtype) as moe:
        moe.tokenizer.model_max_length = 1 << 30
        text: list[int] = moe.tokenizer(TEXT.read_text("utf-8"))["input_ids"]
        new = (args.tokens - (args.turns - 1) * NUM_ANSWER) // args.turns
        ways = {size: Engine(moe, ServeConfig(prefix_cache=size)) for size in ("2GiB", "off")}
        prompt: list[int] = []
        print("| turn | prompt, tokens | known | first token, s | without | GB read | without |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        is_equal, total = True, dict.fromkeys(ways, 0.0)
        for turn in range(args.turns):
            prompt = [*prompt, *text[turn * new : (turn + 1) * new]]
            order = list(ways) if turn % 2 else list(ways)[::-1]
            found = {size: answer(ways[size], moe, prompt) for size in order}
            kept, off = found["2GiB"], found["off"]
            is_equal &= kept["ids"] == off["ids"]
            for size in ways:
                total[size] += found[size]["s"]
            print(
                f"| {turn + 1} | {len(prompt)} | {kept['cached']} | {kept['s']:.2f} | "
                f"{off['s']:.2f} | {kept['read'] / 1e9:.2f} | {off['read'] / 1e9:.2f} |"
            )
            prompt = [*prompt, *kept["ids"]]
    faster = total["off"] / total["2GiB"]
    print(json.dumps({"benchmark": "conversation", "times": faster, "equal": is_equal}))
    if args.dtype == "float32" and not is_equal:
        raise SystemExit("answers differ")


if __name__ == "__main__":
    main()
