"""How does the hit rate of decoding rise with the share of experts that have slots?

    python benchmarks/policies/curves.py ../shared/data --traces gpt-oss --requests 24 \\
        --output moe_infinity/tools/planning/curves.json

`moe-infinity plan` expects these rates of models of which no trace is at hand. One user, cold
start, no prefetch; a quarter of the requests warm up.
"""

from __future__ import annotations

import json
from pathlib import Path

import common

from moe_infinity.tools.planning.hit_rates import replayed

POLICIES = ("activation-aware", "lru")
SHARES = (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SOURCES = {  # as the README of the data states them
    "gpt-oss": "AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting@72b368f60045, Apache-2.0",
    "deepseek": "deepseek-ai/ESFT@579a7711e4b3, MIT",
}
COMMAND = (
    "python benchmarks/policies/curves.py ../shared/data --traces {} --requests {} --output {}"
)


def main() -> None:
    parser = common.parser(__doc__, requests=24)
    parser.add_argument(
        "--output", type=Path, help="put them into this file, in place of older ones"
    )
    args = parser.parse_args()
    curves = {}
    if args.output and args.output.exists():
        curves = {found["model"]: found for found in json.loads(args.output.read_text())["curves"]}
    for name, folder in common.folders(args):
        sequences, num_experts = common.requests_of(name, folder, args.requests)
        _, num_layers, top_k = sequences[0].experts_TLK.shape
        conditions = common.describe(name, sequences, len(sequences) // 4)
        slots = [int(share * num_layers * num_experts) for share in SHARES]
        found = replayed(sequences, POLICIES, slots, num_experts=num_experts)
        for policy, rates in found.items():
            print(f"{policy:18}" + "".join(f"{100 * rate:7.1f}" for rate in rates))
        curves[common.TITLES[name]] = {
            "model": common.TITLES[name],
            "trace": common.TRACES[name],
            "source": SOURCES[name],
            "num_layers": num_layers,
            "num_experts": num_experts,
            "top_k": top_k,
            "requests": conditions["requests"],
            "tokens": conditions["tokens"],
            "seed": 0,
            "made_by": COMMAND.format(name, args.requests, args.output),
            "rates": {
                policy: {
                    str(share): round(rate, 3) for share, rate in zip(SHARES, rates, strict=True)
                }
                for policy, rates in found.items()
            },
        }
    if args.output:
        text = json.dumps({"curves": list(curves.values())}, indent=1)
        args.output.write_text(f"{text}\n", "utf-8")
    common.finish("curves", list(curves.values()))


if __name__ == "__main__":
    main()
