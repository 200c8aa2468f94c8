"""A cache that is left as it was by a forward pass that fails, or whose tokens the target then reads itself."""

from typing import Any

import torch
from transformers import PreTrainedModel

from .errors import BatchMismatchError
from .guarded_cache import GuardedCache
from .layers import FilledTranslator, PendingLayer
from .snapshots import Growth, Snapshot


class RestoringCache(GuardedCache):
    """
    Guards a cache while its layers are translated one by one in a forward pass.

    Args:
        target (`PreTrainedModel`):
            The model that will use it.
    """

    def __init__(self, target: PreTrainedModel):
        super().__init__(target)
        # Layers as they were before this forward pass, to go back to if a later one fails.
        self._before: dict[int, Snapshot] = {}
        self._is_settled = False

    @property
    def _may_recompute(self) -> bool:
        """Whether the target may read the tokens itself where their translation fails."""
        return False

    @property
    def _exact_layers(self) -> int:
        """The last layer that is given what a prefill gives it, -1 if there is none."""
        return -1

    def _refuse(self, failure: str) -> None:
        """Note that nothing is translated, and why."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if self._is_settled:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self._before:
            self._before.clear()  # another forward pass has begun
        before, failure = Snapshot.of(self.layers[layer_idx]), None
        try:
            if isinstance(layer := self.layers[layer_idx], PendingLayer) and not self._before:
                layer.pending.translator.check_target()
            states = self._translate_and_update(key_states, value_states, layer_idx, before, *args, **kwargs)
        except BaseException as error:
            if "pending" in before.attributes:
                error.add_note(str(before.attributes["pending"]))
            # What native layers have given in this pass is what a prefill gives: it may stay.
            exact = self._exact_layers
            used, self._before = self._before, {layer_idx: before}
            self._restore()
            if any(i > exact for i in used) or not self._can_recompute(error, exact):
                self._before = used
                self._restore()
                raise
            self._before = used
            failure = describe(error)
        if failure is not None:
            # Not while the error is handled: it would keep alive what the translation had allocated.
            self._recompute(failure)
            states = self._translate_and_update(key_states, value_states, layer_idx, before, *args, **kwargs)
        if not any(isinstance(layer, PendingLayer) for layer in self.layers):
            self._is_settled = True
            self._before.clear()
        return states

    def _translate_and_update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        before: Snapshot,
        *args,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        if isinstance(layer, PendingLayer):
            layer.materialize(key_states.device, key_states.dtype, key_states.shape[0])
        growth = Growth.of(layer)
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # Rather than what it was translated from, which its last reader lets go of.
        self._before[layer_idx] = before if growth is None else growth.before(layer, states)
        return states

    def _restore(self) -> None:
        """Take back what this forward pass has done to layers, so that the cache can be asked again."""
        for layer_idx, snapshot in self._before.items():
            self.layers[layer_idx] = snapshot.restored()
        self._before.clear()

    def _can_recompute(self, error: BaseException, exact: int) -> bool:
        """Whether the target can still read the context itself: no mapped layer was used before, and it would help."""
        # Layers that share another one's states count as initialised, but hold nothing.
        own = [
            layer
            for i, layer in enumerate(self.layers)
            if (i > exact or isinstance(layer, PendingLayer))
            and layer.is_initialized
            and not getattr(layer, "is_dummy", False)
        ]
        return (
            self._may_recompute
            and isinstance(error, Exception)
            and not isinstance(error, BatchMismatchError)
            and bool(own)
            and all(isinstance(layer, PendingLayer) for layer in own)
        )

    def _recompute(self, failure: str) -> None:
        """Let the target read the context, in the middle of its forward pass, and stand in for the translation."""
        pending = [layer for layer in self.layers if isinstance(layer, PendingLayer)]
        translator = pending[0].pending.translator
        native = FilledTranslator(translator, translator.prefill())
        for layer in pending:
            layer.pending.translator = native.only(layer.pending.layer_idx)
        self._refuse(failure)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: keys and values, and nothing of the models that they are from."""
        for layer in self.layers:
            if isinstance(layer, PendingLayer):
                layer.materialize_unasked()
        self._before.clear()
        return dict(vars(self))


def describe(error: BaseException) -> str:
    """An error and its notes in one line."""
    text, notes = f"{type(error).__name__}: {error}", getattr(error, "__notes__", ())
    return " ".join([text.rstrip(".") + ".", *notes]) if notes else text
