"""One update: gradients of every micro-batch, summed; then the optimizer, unless something is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxgrpo.learner.logprobs import DEFAULT_BLOCK, token_logprobs
from jaxgrpo.learner.optimizer import Optimizer, Tree
from jaxgrpo.learner.state import TrainState, abstract_state
from jaxgrpo.metrics import Mean, Metrics, merge
from jaxgrpo.models.attention import packed_attention
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.sharding import batch_sharding, replicated
from jaxgrpo.types.batch import ROW_FIELDS, TokenBatch

Array = jax.Array


class Objective(Protocol):
    """What is minimised.

    Called with log-probs and entropies (None unless `needs_entropy`) of the targets, float32 [R, K], and the batch. Returns
    the micro-batch's share of the update's loss (divided by the batch's denominators, so that shares add up) and metrics.
    """

    needs_entropy: bool

    def __call__(self, logprobs: Array, entropy: Array | None, batch: TokenBatch) -> tuple[Array, Metrics]:
        """Loss and metrics."""
        ...


@dataclass(frozen=True)
class Learner:
    """Applies updates; holds no array, only compiled functions.

    Attributes:
        decoder, objective, optimizer: what is trained, for what, and how.
        mesh: where; rows of a batch are split over its data axes.
        temperature: of the policy whose log-probs are meant; the sampler's.
        block: vocabulary entries that `token_logprobs` handles at once.
        through: applied to the log-probs [R, K] before the objective sees them: the place for a function that leaves the
            value alone and changes the gradient.
    """

    decoder: Decoder
    objective: Objective
    optimizer: Optimizer
    mesh: Mesh
    temperature: float = 1.0
    block: int = DEFAULT_BLOCK
    through: Callable[[Array, TokenBatch], Array] | None = None

    def update(self, state: TrainState, batches: Sequence[TokenBatch]) -> tuple[TrainState, Metrics]:
        """One update from all micro-batches of `Packed.batches`; `state` is donated and must not be used again.

        If the loss or a gradient is not finite, parameters and optimizer state stay as they were, the skip is counted and
        only `update_skipped` is reported. Without batches nothing happens and nothing is reported.

        Returns:
            the new state, and the objective's metrics with `loss`, `grad_norm` (before clipping), `learning_rate`, and
            `update_skipped`.
        """
        if not batches:
            return state, {}
        grads, loss, parts = self.gradients(state.params, batches)
        counters = (state.updates, state.skipped, state.skipped_in_a_row)
        params, opt_state, counters, own = self._apply(state.params, state.opt_state, counters, grads, loss)
        state = TrainState(params, opt_state, *counters, reference=state.reference)
        own, parts = jax.device_get((own, parts))
        if own["update_skipped"].total:
            return state, {"update_skipped": own["update_skipped"]}
        metrics: Metrics = {}
        for part in parts:
            metrics = merge(metrics, part)
        return state, merge(metrics, own)

    def gradients(self, params: Tree, batches: Sequence[TokenBatch]) -> tuple[Tree, Array, list[Metrics]]:
        """Gradient of the whole update's loss in the trainable parameters, that loss, and each micro-batch's metrics."""
        total, metrics = None, []
        for batch in batches:
            grads, loss, part = self._gradient(params, self.place(batch))
            total = (grads, loss) if total is None else self._add(total, (grads, loss))
            del grads  # of a large model there is room for two gradients, not for three
            metrics.append(part)
        assert total is not None, "no batches: there is nothing to differentiate"
        return *total, metrics

    def logprobs(self, params: Tree, batches: Sequence[TokenBatch]) -> list[np.ndarray]:
        """Log-probs of the targets, float32 [R, K] a micro-batch; anything at padding. For old and reference log-probs."""
        return [np.asarray(self._score(params, self.place(batch))) for batch in batches]

    def place(self, batch: TokenBatch) -> TokenBatch:
        """The batch on the devices: rows split over the data axes, scalars everywhere."""
        rows, everywhere = batch_sharding(self.mesh), replicated(self.mesh)
        places = {name: rows if name in ROW_FIELDS else everywhere for name in batch.__dataclass_fields__}
        return jax.device_put(batch, TokenBatch(**places))

    def forward(self, params: Tree, batch: TokenBatch, with_entropy: bool = False) -> tuple[Array, Array | None]:
        """Log-probs of the targets and, if asked for, entropies: float32 [R, K]. Pure; to be jitted or differentiated."""
        attend = packed_attention(batch.segment, batch.parent, batch.positions)
        hidden, _ = self.decoder.apply(params, batch.tokens, batch.positions, attend)
        predicting = jnp.take_along_axis(hidden, batch.hidden_index[..., None], axis=1)
        logprobs, entropy = token_logprobs(
            predicting.reshape(-1, hidden.shape[-1]),
            self.decoder.head(params),
            batch.token.reshape(-1),
            self.temperature,
            block=self.block,
            with_entropy=with_entropy,
        )
        shape = batch.token.shape
        return logprobs.reshape(shape), None if entropy is None else entropy.reshape(shape)

    def loss(self, params: Tree, batch: TokenBatch) -> tuple[Array, Metrics]:
        """The micro-batch's share of the loss, and metrics. Pure."""
        logprobs, entropy = self.forward(params, batch, self.objective.needs_entropy)
        if self.through is not None:
            logprobs = self.through(logprobs, batch)
        return self.objective(logprobs, entropy, batch)

    @cached_property
    def _places(self) -> TrainState:
        # Results are pinned to where the state was born: left to the compiler, an equivalent sharding under another
        # spelling would compile everything again at the second update.
        return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(self.decoder, self.optimizer, self.mesh))

    @cached_property
    def _gradient(self) -> Callable[..., Any]:
        def gradient(params: Tree, batch: TokenBatch) -> tuple[Tree, Array, Metrics]:
            trainable, frozen = self.optimizer.split(params)

            def loss_of(trainable: Tree) -> tuple[Array, Metrics]:
                return self.loss(self.optimizer.join(trainable, frozen), batch)

            (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
            return grads, loss, metrics

        return jax.jit(gradient, out_shardings=(self.optimizer.split(self._places.params)[0], None, None))

    @cached_property
    def _add(self) -> Callable[..., Any]:
        places = (self.optimizer.split(self._places.params)[0], None)
        return jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=places)

    @cached_property
    def _score(self) -> Callable[..., Any]:
        return jax.jit(lambda params, batch: self.forward(params, batch)[0], out_shardings=replicated(self.mesh))

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        places, everywhere = self._places, replicated(self.mesh)
        results = (places.params, places.opt_state, everywhere, everywhere)
        return jax.jit(partial(_apply, self.optimizer), donate_argnums=(0, 1), out_shardings=results)


def _apply(
    optimizer: Optimizer, params: Tree, opt_state: Tree, counters: tuple[Array, Array, Array], grads: Tree, loss: Array
) -> tuple[Tree, Tree, tuple[Array, Array, Array], Metrics]:
    """The optimizer's update where everything is finite; what was there before, where it is not."""
    updates, skipped, in_a_row = counters
    norm = optax.global_norm(grads)  # not finite if a single gradient is not
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    trainable, frozen = optimizer.split(params)
    steps, new_opt_state = optimizer.transform.update(grads, opt_state, trainable)
    new = (optax.apply_updates(trainable, steps), new_opt_state)
    trainable, opt_state = jax.tree.map(
        lambda after, before: jnp.where(finite, after, before), new, (trainable, opt_state)
    )
    one, ok = jnp.float32(1), finite.astype(jnp.int32)
    metrics = {
        "loss": Mean(loss, one),
        "grad_norm": Mean(norm, one),
        "learning_rate": Mean(jnp.float32(optimizer.learning_rate(updates)), one),
        "update_skipped": Mean(1 - ok.astype(jnp.float32), one),
    }
    counters = (updates + ok, skipped + 1 - ok, (in_a_row + 1) * (1 - ok))
    return optimizer.join(trainable, frozen), opt_state, counters, metrics
