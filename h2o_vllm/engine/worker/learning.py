# SPDX-License-Identifier: Apache-2.0
"""What :mod:`h2o_vllm.calibrate` asks of a worker: to look at its attention, and to write what it learns.

On any device, in a worker that has all of the model; with ``enforce_eager``, as hooks see no compiled layer.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from h2o_vllm.calibration.file import Calibration, Traits
from h2o_vllm.calibration.learner import Learner, Softmax


class LearningWorker:
    """A base of workers."""

    _learner: Learner | None = None
    _layers: Sequence[Sequence[Any]] = ()
    """Of the evictable layers that hold KV: each, and those that read its KV."""

    @abstractmethod
    def _traits(self, size: int) -> Traits:
        """Of the whole model, of heads of this size."""

    def learn(self, text: int, request: int) -> None:
        """From now on, from every step of ``request`` tokens.

        Args:
            text: number of a request's first tokens that are the text that it repeats.
        """
        traits = self._state_traits()
        self._learner = learner = Learner(traits.layers, traits.rotation, text, request)

        def look(index: int, layer: Any, given: tuple[Tensor | None, ...]) -> None:
            query, key, value = given[:3]
            impl = layer.impl
            assert query is not None
            learner.look(
                index,
                query.view(-1, layer.num_heads, layer.head_size),
                None if key is None else key.view(-1, layer.num_kv_heads, layer.head_size),
                None if value is None else value.view(-1, layer.num_kv_heads, layer.head_size_v),
                Softmax(impl.scale, impl.logits_soft_cap, impl.sinks),
            )

        for index, layers in enumerate(self._layers):
            for layer in layers:
                layer.register_forward_pre_hook(partial(look, index))

    def learned(self) -> int:
        """Of how many tokens so far."""
        return 0 if self._learner is None else self._learner.tokens

    def save_calibration(self, path: str, about: dict[str, object]) -> None:
        """Write what was learned.

        Raises:
            ConfigError: it cannot be written.
            ValueError: nothing was learned.
        """
        if self._learner is None:
            raise ValueError("nothing was learned")
        Calibration(self._learner.weights(), self._state_traits(), about).save(Path(path))

    def _state_traits(self) -> Traits:
        return self._traits(self._layers[0][0].impl.head_size)
