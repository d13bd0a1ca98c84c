# SPDX-License-Identifier: Apache-2.0
"""Bound launches are those that Triton would make. No kernel is compiled or run here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


from h2o_vllm.kernels.triton import launching
from h2o_vllm.kernels.triton.launching import launch

STREAM, FUNCTION, METADATA = 11, 22, object()


class Kernel:
    """A ``triton.jit`` function and what it compiles, as :func:`launch` sees them."""

    arg_names = ("x", "count", "y", "SIZE", "WIDE")

    def __init__(self) -> None:
        self.through_triton: list[Any] = []
        self.bound: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launched(*args: Any, **constants: Any) -> Any:
            self.through_triton.append((grid, args, constants))
            return SimpleNamespace(
                run=lambda *given: self.bound.append(given), function=FUNCTION, packed_metadata=METADATA
            )  # fmt: skip

        return launched


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    current = SimpleNamespace(number=0)
    monkeypatch.setattr(launching, "_bound", {})
    active = SimpleNamespace(
        get_current_device=lambda: current.number, get_current_stream=lambda at: STREAM + at
    )
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    return current


CONSTANTS = {"WIDE": 4, "SIZE": 3, "num_warps": 8}
"""In another order than the kernel's."""


def test_the_second_launch_of_a_form_is_the_compiled_kernels(device: SimpleNamespace) -> None:
    kernel, x, y = Kernel(), torch.zeros(64), torch.zeros(64)
    for count, grid in ((5, (7,)), (6, (8, 9)), (7, (1, 2, 3))):
        launch(kernel, grid, "form", (x[16 * (count - 5) :], count, None), CONSTANTS)
    ((grid, (given, *others), constants),) = kernel.through_triton
    assert (grid, others, constants) == ((7,), [5, None], CONSTANTS) and torch.equal(given, x)
    fixed = (STREAM, FUNCTION, METADATA, None, None, None)
    address = x.data_ptr()
    assert kernel.bound == [
        (8, 9, 1, *fixed, address + 64, 6, None, 3, 4),
        (1, 2, 3, *fixed, address + 128, 7, None, 3, 4),
    ]
    launch(kernel, (1,), "other form", (x, 5, y), CONSTANTS)
    launch(Kernel(), (1,), "form", (x, 5, y), CONSTANTS)
    assert len(kernel.through_triton) == 2 and len(kernel.bound) == 2
    launch(kernel, (1,), "other form", (x, 5, y), CONSTANTS)
    assert kernel.bound[-1][9:12] == (address, 5, y.data_ptr())


def test_other_alignments_and_devices_go_through_triton(device: SimpleNamespace) -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, (1,), "form", (x[1:], 1, None), CONSTANTS)
    assert not launching._bound
    for _ in range(2):
        launch(kernel, (1,), "form", (x, 1, None), CONSTANTS)
    assert len(kernel.bound) == 1
    launch(kernel, (1,), "form", (x[1:], 1, None), CONSTANTS)
    launch(kernel, (1,), "form", (x, 1, None), CONSTANTS)
    assert len(kernel.bound) == 2
    device.number = 1
    launch(kernel, (1,), "form", (x, 1, None), CONSTANTS)
    launch(kernel, (1,), "form", (x, 1, None), CONSTANTS)
    assert len(kernel.bound) == 3 and kernel.bound[-1][3] == STREAM + 1


@pytest.mark.usefixtures("device")
def test_an_unknown_triton_is_always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching.triton, "__version__", "4.0.0")
    kernel, x = Kernel(), torch.zeros(64)
    for _ in range(3):
        launch(kernel, (1,), "form", (x, 1, None), CONSTANTS)
    assert len(kernel.through_triton) == 3 and not kernel.bound


@pytest.mark.usefixtures("device")
def test_all_launches_may_be_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_binding", SimpleNamespace(allowed=True))
    kernel, x = Kernel(), torch.zeros(64)
    for count in range(4):
        launch(kernel, (1,), "form", (x, count, None), CONSTANTS)
        if count == 1:
            launching.leave_to_triton()
    assert len(kernel.bound) == 1 and len(kernel.through_triton) == 3
