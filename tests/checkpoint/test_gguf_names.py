"""What the names of GGUF files say: which of them a model can be opened by."""

from __future__ import annotations

import pytest

from moe_infinity.checkpoint.file_names import find_gguf, gguf_models

NO_MODELS = [
    "mmproj-f16.gguf", "mmproj.gguf", "Model.mmproj-f16.gguf", "Model-mmproj-F16.gguf",
    "Model_MMPROJ.gguf", "UD/Model.mmproj-Q8_0.gguf", "imatrix.gguf", "imatrix_unsloth.gguf",
    "x.imatrix.gguf", "Model.Imatrix.gguf", "Model-imatrix.gguf", "i1/Model.imatrix.gguf",
]  # fmt: skip
MODELS = [
    "mmprojector.gguf", "Model.gguf", "OmniMatrix.gguf", "Model.i1-Q4_K_M.gguf",
    "imatrix/Model.gguf", "mmproj-test/Model.gguf",
]  # fmt: skip
BY_A_MATRIX = [  # names in circulation
    "DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix.gguf",
    "GLM-4.6V-Flash-heretic-imatrix-Q4_K_M.gguf",
    "Qwen3-VL-235B-A22B-imatrix-Q4_K_M-00001-of-00003.gguf",
]


@pytest.mark.parametrize("name", NO_MODELS)
def test_vision_parts_and_importance_matrices_are_no_models(name, tmp_path):
    assert gguf_models([name, "Model.Q8_0.gguf"]) == ["Model.Q8_0.gguf"]
    for file in (name.rpartition("/")[2], "Z.gguf"):
        (tmp_path / file).touch()
    assert find_gguf(str(tmp_path)) == tmp_path / "Z.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_a_word_that_only_contains_theirs_is_of_a_model(name):
    assert gguf_models([name]) == [name]


@pytest.mark.parametrize("name", BY_A_MATRIX)
def test_a_model_that_was_quantized_by_a_matrix_is_a_model(name):
    assert gguf_models([name]) == [name]
