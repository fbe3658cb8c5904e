"""The real SmolLM2-135M: sampler against learner, and the export against transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.algo.objective import from_preset
from jaxgrpo.config.schema import OptimizerSection
from jaxgrpo.data.chat import ChatTokenizer
from jaxgrpo.engines.jax_engine import JaxEngine
from jaxgrpo.learner.layout import choose_layout
from jaxgrpo.learner.optimizer import make_optimizer
from jaxgrpo.learner.packing import Sample, pack, unpack
from jaxgrpo.learner.state import create, decoder_shardings
from jaxgrpo.learner.step import Learner
from jaxgrpo.metrics import finalize
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.rollout.engine import SamplingParams
from jaxgrpo.rollout.episode import EpisodeSpec
from jaxgrpo.rollout.schedulers import SingleTurn
from jaxgrpo.sharding import make_mesh
from jaxgrpo.types.rollout import Prompt, Trajectory
from jaxgrpo.weights.checkpoint_files import export_pretrained, load_pretrained

MODEL = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"
QUESTIONS = ("What is 12+7?", "Name three colours.", "Write one line of Python that prints the numbers 1 to 10.")

pytestmark = pytest.mark.slow


def sample(engine: JaxEngine, chat: ChatTokenizer, temperature: float, per_prompt: int) -> list[Trajectory]:
    """Plays single-turn episodes of `QUESTIONS`."""

    async def play() -> list[list[Trajectory]]:
        specs = []
        for place, question in enumerate(QUESTIONS):
            prompt = Prompt(str(place), ({"role": "user", "content": question},), None, {})
            for number in range(per_prompt):
                sampling = SamplingParams(24, temperature, stop_token_ids=chat.eos_ids, seed=100 * place + number)
                specs.append(EpisodeSpec(prompt, tuple(chat.encode_prompt(prompt)), f"{place}.{number}", sampling))
        return await asyncio.gather(*(SingleTurn().run(spec, engine, chat.decode) for spec in specs))

    return [trajectory for episode in asyncio.run(play()) for trajectory in episode]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_learner_agree_and_the_first_ratio_is_exactly_one(temperature: float) -> None:
    """Pain point P20; packed, shared prompts on one side, a cache on the other."""
    mesh = make_mesh({"fsdp": -1})
    jax.set_mesh(mesh)
    chat = ChatTokenizer(str(MODEL))
    config, _ = load_pretrained(str(MODEL))
    decoder = Decoder(config, jnp.dtype("float32"))
    _, params = load_pretrained(str(MODEL), shardings=decoder_shardings(decoder, mesh))
    engine = JaxEngine(decoder, slots=16, max_context=512, stop_text=chat.decode)
    engine.load(params, version=0)
    trajectories = sample(engine, chat, temperature, per_prompt=4)
    assert len({tuple(t.tokens) for t in trajectories}) > len(trajectories) // 2, "samples of a group must differ"

    optimizer = make_optimizer(OptimizerSection(learning_rate=1e-6), 1, decoder.axes)
    learner = Learner(decoder, from_preset("grpo", kl_coef=0.0), optimizer, mesh, temperature=temperature)
    samples = [Sample(t, float(index % 3 - 1)) for index, t in enumerate(trajectories)]
    packed = pack(samples, choose_layout(64, 24, 4, 1024), keep_zero_advantage=True)
    learned = unpack(packed, learner.logprobs(params, packed.batches))
    gaps = [np.abs(values - t.logprobs)[t.loss_mask].max() for values, t in zip(learned, trajectories, strict=True)]
    assert max(gaps) <= 1e-4
    _, metrics = learner.update(create(params, optimizer), packed.batches)
    values = finalize(metrics)
    assert values["ratio/min"] == values["ratio/max"] == 1.0 and np.isfinite(values["grad_norm"])


def test_the_export_says_the_same_in_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    chat = ChatTokenizer(str(MODEL))
    config, params = load_pretrained(str(MODEL))
    # Not the weights on disk: something that only this process knows.
    params["final_norm"]["scale"] = params["final_norm"]["scale"] * 1.01
    exported = export_pretrained(params, config, str(MODEL), str(tmp_path / "export"))
    engine = JaxEngine(Decoder(config, jnp.dtype("float32")), slots=4, max_context=512)
    engine.load(params, version=0)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for trajectory in sample(engine, chat, 0.0, per_prompt=1):
        prompt = torch.tensor([trajectory.tokens[: trajectory.prompt_length].tolist()])
        settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": list(chat.eos_ids)}
        said = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0].tolist()
        assert said == trajectory.tokens.tolist()
