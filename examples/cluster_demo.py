"""A cluster of two local Ray nodes, to see that it works. Needs the extra `cluster`.

    python examples/cluster_demo.py [MODEL]

An expert host computes a part of the bundled model's experts and is killed; two replicas serve the
model, and one of them is killed while it answers. Every answer has the tokens of one process: only
then the exit code is 0.
"""

import logging
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from moe_infinity.cluster.model import ClusterMoE
from moe_infinity.cluster.placement import RayPlacement
from moe_infinity.cluster.replicas import build_app
from moe_infinity.model import MoE

OBJECT_STORE_BYTES = 100 << 20
PROMPTS = (
    "The old house stood at the edge of the moor, and",
    "Question: What is a fever?\nAnswer:",
    "def area(width, height):",
    "She opened the letter and",
)
NUM_TOKENS = 24
OPTIONS = {"host_memory": "50%", "device": "cpu"}
BACK_S = 120.0  # for a killed host or replica to be back

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"


def run(model: str) -> bool:
    """Return True if all answers were equal, and the work went on after each kill."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster of this machine alone
    print("alone: one process, half of the experts in memory")
    with MoE(model, **OPTIONS) as moe:
        alone = [_text(moe, prompt) for prompt in PROMPTS]
    nodes = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    print("cluster: starting two local Ray nodes")
    cluster = Cluster(initialize_head=True, head_node_args=nodes)
    try:
        cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, logging_level=logging.WARNING, log_to_driver=False)
        survived = [_expert_hosts(model, cluster.address, alone), _replicas(model, alone)]
        return all(survived)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _text(moe: MoE, prompt: str) -> str:
    stream = moe.stream(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
    for _ in stream:
        pass
    return stream.text


def _expert_hosts(model: str, address: str, alone: list[str]) -> bool:
    print("expert host: one more process computes every second expert")
    options: dict[str, Any] = OPTIONS | {"expert_hosts": 1, "cluster": address}
    with ClusterMoE(model, **options) as moe:
        hosts = moe.hosts
        assert hosts is not None
        assert isinstance(hosts.placement, RayPlacement)
        first = [_text(moe, prompt) for prompt in PROMPTS]
        took_part = set(hosts.running) == {1}
        print(f"  it took part: {took_part}; same text: {first == alone}")
        stream = moe.stream(PROMPTS[0], max_new_tokens=NUM_TOKENS, do_sample=False)
        pieces = iter(stream)
        next(pieces)
        ray.kill(hosts.placement.actors[1])
        for _ in pieces:
            pass
        second = [stream.text, *(_text(moe, prompt) for prompt in PROMPTS[1:])]
        print(f"  killed while it computed; same text: {second == alone}")
        give_up_at = time.monotonic() + BACK_S
        while set(hosts.running) != {1} and time.monotonic() < give_up_at:
            third = [_text(moe, prompt) for prompt in PROMPTS]
        is_back = set(hosts.running) == {1}
        print(f"  started again, and takes part: {is_back}; same text: {third == alone}")
    return took_part and is_back and first == second == third == alone


def _replicas(model: str, alone: list[str]) -> bool:
    print("replicas: two processes behind one address")
    port = _free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = build_app(model, replicas=2, model=OPTIONS, server={"max_batch": 1}, cores=0.5)
    serve.run(app)
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.Client(timeout=BACK_S) as client:

        def ask(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
            answer = client.post(url, json=body)
            if answer.status_code != 200:
                return f"status {answer.status_code}: {answer.text}"
            return str(answer.json()["choices"][0]["text"])

        first = [ask(prompt) for prompt in PROMPTS]
        print(f"  same text: {first == alone}")
        replicas = serve.get_deployment_handle("Replica", "default")
        pid = replicas.pid.remote().result()
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            answers = [threads.submit(ask, prompt) for prompt in PROMPTS * 4]
            time.sleep(0.2)
            psutil.Process(pid).kill()
            second = [answer.result() for answer in answers]
        print(f"  one killed while 16 requests were there; same text: {second == alone * 4}")
    serve.shutdown()
    return first == alone and second == alone * 4


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """Run the demo, and end with exit code 1 if anything differs."""
    model = Path(sys.argv[1] if len(sys.argv) > 1 else DEMO)
    if not run(str(model.resolve())):
        sys.exit("not all was as it should be")
    print("all as with one process")


if __name__ == "__main__":
    main()
