"""CHORD and the teacher's signals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from loss_oracle import random_arrays

from jaxgrpo.algo.distillation import rlsd_advantages, rlsd_strength, sdar, teacher_advantages
from jaxgrpo.algo.supervised import chord_mu, mix, supervised_loss


def test_chord_mu_rises_decays_and_stays() -> None:
    schedule = dict(warmup_steps=4, decay_steps=8, peak=0.8, valley=0.2)
    values = [float(chord_mu(step, **schedule)) for step in (0, 2, 4, 8, 12, 100)]
    np.testing.assert_allclose(values, [0, 0.4, 0.8, 0.5, 0.2, 0.2], atol=1e-6)
    no_warmup = chord_mu(0, warmup_steps=0, decay_steps=0, peak=0.8, valley=0.2)
    np.testing.assert_allclose(no_warmup, 0.2, atol=1e-6)


def test_chord_phi_weighs_by_uncertainty_without_a_gradient_of_its_own() -> None:
    logprobs, mask = jnp.log(jnp.array([[0.5, 0.9, 0.1, 0.3]])), jnp.array([[1, 1, 1, 0]])
    plain = jax.grad(lambda x: supervised_loss(x, mask, 3.0))(logprobs)
    np.testing.assert_allclose(plain, [[-1 / 3, -1 / 3, -1 / 3, 0]], atol=1e-6)
    phi = jax.grad(lambda x: supervised_loss(x, mask, 3.0, phi=True))(logprobs)
    np.testing.assert_allclose(phi, [[-0.25 / 3, -0.09 / 3, -0.09 / 3, 0]], atol=1e-6)
    np.testing.assert_allclose(mix(2.0, 4.0, 0.25), 2.5)


def test_rlsd_strength() -> None:
    values = [float(rlsd_strength(step, strength=0.5, warmup_steps=2, decay_steps=4)) for step in (0, 1, 2, 4, 6, 9)]
    np.testing.assert_allclose(values, [0, 0.25, 0.5, 0.25, 0, 0])
    assert float(rlsd_strength(7)) == 0.5


def test_rlsd_negative_only_and_sign() -> None:
    arrays = random_arrays(0)
    args = (arrays["advantages"][:, None], arrays["teacher_logprobs"], arrays["old_logprobs"], arrays["loss_mask"])
    both = np.asarray(rlsd_advantages(*args))
    negative = np.asarray(rlsd_advantages(*args, negative_only=True))
    trained = arrays["loss_mask"] > 0
    assert np.all(np.sign(both) == np.sign(arrays["advantages"])[:, None] * trained)
    expected = np.broadcast_to(arrays["advantages"][:, None], trained.shape)
    np.testing.assert_allclose(negative[[0, 2]][trained[[0, 2]]], expected[[0, 2]][trained[[0, 2]]])
    np.testing.assert_allclose(negative[[1, 3]], both[[1, 3]])


def test_masked_garbage_in_teacher_terms() -> None:
    arrays = random_arrays(1)
    mask, garbage = arrays["loss_mask"], np.float32(np.nan)
    teacher, old = (np.where(mask > 0, arrays[name], garbage) for name in ("teacher_logprobs", "old_logprobs"))
    base = arrays["advantages"][:, None]
    assert np.all(np.isfinite(teacher_advantages(base, teacher, old, mask)))
    assert np.all(np.isfinite(rlsd_advantages(base, teacher, old, mask)))
    grad = jax.grad(lambda x: sdar(x, teacher, mask)[0].sum())(old)
    assert np.all(np.isfinite(grad)) and not np.any(grad[mask == 0])
    assert np.all(grad[mask > 0] <= 0), "minimising raises the policy's log-probs"
