# SPDX-License-Identifier: Apache-2.0
"""The command that calibrates, on a GPU: what it learns is what an independent model shows. Not run yet."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from h2o_vllm.calibrate import __main__ as command
from h2o_vllm.calibrate.run import LENGTH
from h2o_vllm.calibration.file import Calibration
from h2o_vllm.calibration.regression import Sums
from tests.engine.test_calibrate import weights_of
from tests.gpu.engine.conftest import REHEARSED

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]


def test_the_weights_are_those_of_an_independent_model(
    random_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, source = tmp_path / "model.h2o", Path(str(torch.nn.modules.rnn.__file__))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if REHEARSED:
        # What kernels have not added up has no solution.
        monkeypatch.setattr(Sums, "solve", lambda sums: torch.zeros(sums._targets.shape))
    arguments = ["--model", random_llama, "--output", str(file), "--texts", str(source)]
    arguments += ["--dtype", "float32", "--gpu-memory-utilization", "0.15"]
    with knobs.runtime.scope():
        # An engine of another test forbids to compile while serving; this one is eager.
        knobs.runtime.jit_post_compile_hook = None
        assert command.main(arguments) == 0
    found = Calibration.load(file)
    assert found.about["tokens"] == 2 * (LENGTH - 1)
    if REHEARSED:
        return
    expected = weights_of(random_llama, source.read_text())
    torch.testing.assert_close(found.weights, expected, rtol=1e-2, atol=1e-2)
