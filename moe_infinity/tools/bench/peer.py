"""Our end of the process that runs llama.cpp. Its memory and its crashes stay there; every wait has
an end.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from moe_infinity.errors import ConfigError, MoEInfinityError
from moe_infinity.tools.bench import llama_process
from moe_infinity.tools.bench.rows import LLAMA_CPP, Needs, Sample

IMPORT_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 3600.0  # loading, or one text of a large model on a slow machine
CLOSE_TIMEOUT_S = 10.0
SHOWN_LINES = 5  # of what it said before it died


def parse_compare(text: str) -> Path:
    """The file of "llama.cpp:FILE.gguf". Raises ConfigError."""
    system, colon, name = text.partition(":")
    if system != LLAMA_CPP or not colon or not name:
        raise ConfigError(
            f"--compare: {text!r} names nothing to compare with\n"
            "hint: --compare llama.cpp:FILE.gguf"
        )
    file = Path(name)
    if not file.is_file():
        raise ConfigError(
            f"--compare: {file} is not a file\n"
            "hint: tools/convert_to_gguf.py of the repository writes a checkpoint as GGUF"
        )
    return file


def require_llama_cpp(python: str) -> None:
    """Raises ConfigError if this interpreter cannot import llama_cpp."""
    command = [python, "-c", "import llama_cpp"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--llama-python: {python} cannot be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(
            f"--compare needs llama-cpp-python, which {python} cannot import: {said[0]}\n"
            "hint: pip install llama-cpp-python, or name an interpreter that has it with "
            "--llama-python"
        )


class Peer:
    """llama.cpp with a GGUF file, in a process that ends with `close()`, or with ours."""

    def __init__(self, file: Path, *, python: str, num_threads: int, num_positions: int) -> None:
        """Waits until the file is loaded. Raises MoEInfinityError."""
        settings = {"gguf": str(file), "threads": num_threads, "context": num_positions}
        self._file = file
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._process = subprocess.Popen(
            [python, llama_process.__file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # Ctrl-C is ours
        )
        Thread(target=self._read, daemon=True).start()
        self.needs: Needs | None = None
        try:
            self.about = str(self._answer()["about"])
        except BaseException:
            self.close()
            raise

    def run(self, ids: list[int], num_prompt: int) -> tuple[Sample, Sample]:
        """Of a prompt, and of the tokens after it. Raises MoEInfinityError."""
        assert self._process.stdin is not None
        request = json.dumps({"ids": ids, "num_prompt": num_prompt})
        with suppress(OSError):  # a dead one says why below
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        took = self._answer()
        decoded = Sample(len(ids) - num_prompt, float(took["decode_s"]))
        return Sample(num_prompt, float(took["prompt_s"])), decoded

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(CLOSE_TIMEOUT_S)
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")  # the end

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=ANSWER_TIMEOUT_S)
        except Empty:
            raise MoEInfinityError(
                f"{self._file}: llama.cpp did not answer for {ANSWER_TIMEOUT_S:.0f} s"
            ) from None
        if not line:
            raise MoEInfinityError(f"{self._file}: llama.cpp ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        code = self._process.wait(CLOSE_TIMEOUT_S)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return "\n".join([f"exit status {code}", *said[-SHOWN_LINES:]])
