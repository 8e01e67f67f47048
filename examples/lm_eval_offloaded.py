"""`lm_eval` with a model that MoE-Infinity loaded: its experts need not fit into memory.

pip install -e '.[evaluate]' -c constraints.txt
python examples/lm_eval_offloaded.py models/demo --tasks moe_choice,moe_prose
"""

from argparse import ArgumentParser

from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from moe_infinity import MoE

parser = ArgumentParser(description="lm_eval with a model that MoE-Infinity loaded")
parser.add_argument("model", help="a checkpoint folder or a hub id")
parser.add_argument("--tasks", required=True, help="names, separated by commas")
parser.add_argument("--include-path", default="examples/evaluation", help="folder of more tasks")
parser.add_argument("--host-memory", default="25%", help="for experts")
parser.add_argument("--dtype", default="auto", help="of weights and arithmetic")
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--output-path", help="folder for results and samples")
asked = parser.parse_args()

with MoE(asked.model, host_memory=asked.host_memory, dtype=asked.dtype) as moe:
    lm = HFLM(
        pretrained=moe.model,
        tokenizer=moe.tokenizer,
        batch_size=asked.batch_size,
        softmax_dtype="float32",
    )
    found = simple_evaluate(
        lm,
        tasks=asked.tasks.split(","),
        task_manager=TaskManager(include_path=asked.include_path),
        bootstrap_iters=0,
    )
    print(moe.report())

samples = found.pop("samples")
print(make_table(found))
if asked.output_path:
    tracker = EvaluationTracker(output_path=asked.output_path)
    tracker.save_results_aggregated(found, samples)
    for task in found["configs"]:
        tracker.save_results_samples(task, samples[task])
