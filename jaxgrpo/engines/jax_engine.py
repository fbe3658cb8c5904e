"""The embedded sampler as an `Engine`: coroutines hand in requests, one driver task decodes them in a worker thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict

import jax
from jax.sharding import Mesh

from jaxgrpo.engines.jax_batch import Batch
from jaxgrpo.engines.jax_generate import programs
from jaxgrpo.engines.jax_layout import Request
from jaxgrpo.models.decoder import Decoder, Params
from jaxgrpo.rollout.engine import Choice, SamplingParams

_SETTLE = 5  # turns of the event loop without a new request after which everything that is ready has come


class JaxEngine:
    """Samples with the learner's own parameters, in the learner's process.

    The random numbers of a request come from its seed and the number of the token alone, so its tokens depend neither
    on its neighbours nor on the slot it gets (other than by the last bits of floating-point sums in batches of other
    shapes).

    Args:
        decoder: the model; unrolled is faster on a CPU, scanned compiles faster and suits accelerators.
        slots: sequences decoded at once, at most.
        max_context: most tokens of a prompt and its completion together.
        stop_text: decodes token ids to text; needed for stop strings only.
        steps: tokens drawn between two looks of the host; default 1 on a CPU, where looking is cheap, 8 elsewhere.
        prefill_tokens: prompt tokens computed at once; bounds the memory of a prefill.
        mesh: the mesh of the parameters, if they are on more than one device (of one process).
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        max_context: int,
        stop_text: Callable[[tuple[int, ...]], str] | None = None,
        steps: int | None = None,
        prefill_tokens: int = 4096,
        mesh: Mesh | None = None,
    ):
        on_cpu = jax.default_backend() == "cpu"
        self._max_context = max_context
        self._programs = programs(decoder, mesh)
        self._compiled_before = self._programs.compilations
        self._batch = Batch(
            self._programs,
            slots=slots,
            steps=steps or (1 if on_cpu else 8),
            prefill_tokens=prefill_tokens,
            # On a CPU arithmetic is what costs, so empty slots do; elsewhere a step costs the reading of the weights.
            step_cost=24.0 if on_cpu else 512.0,
            operations_per_byte=20.0 if on_cpu else 250.0,
            stop_text=stop_text,
        )
        self._lock = threading.Lock()  # held while the batch is in use
        self._arrivals: list[Request] = []
        self._waiting: dict[int, tuple[Request, asyncio.Future[Choice]]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._broken = False

    @property
    def max_context(self) -> int:
        """Prompt and completion together may have at most this many tokens."""
        return self._max_context

    @property
    def compilations(self) -> int:
        """Programs compiled since this engine was made; stands still once every shape has been seen."""
        return self._programs.compilations - self._compiled_before

    def stats(self) -> dict[str, float]:
        """Counters since the engine was made (see `jax_batch.Stats`) and `compilations`."""
        return {**asdict(self._batch.stats), "compilations": self.compilations}

    def load(self, params: Params, version: int) -> None:
        """Samples with `params` from now on; what is under way goes on with them. Waits for a step in progress.

        The arrays are used as they are, except that on a CPU an unrolled decoder's layers are copied apart, and that a
        decoder of a narrower type gets a copy of the matrices in it. They must stay alive until the next `load`: a
        learner that donates its parameters loads the new ones before it samples again.
        """
        with self._lock:
            self._batch.load(params, version)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Choice:
        """Draws one completion. Requests that wait together are batched; those with equal `token_ids` share the prompt.

        Raises:
            ValueError: the prompt is empty or leaves no room in the context, `max_tokens` is not positive, or
                stop strings are asked of an engine without `stop_text`.
        """
        request = self._request(tuple(token_ids), sampling)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Choice] = loop.create_future()
        self._waiting[id(request)] = (request, future)
        self._arrivals.append(request)
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._drive())
        try:
            return await future
        finally:
            request.cancelled = True  # a no-op when it has ended
            self._waiting.pop(id(request), None)

    def _request(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Request:
        if not prompt:
            raise ValueError("the prompt is empty: at least one token is needed to draw the next one")
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens is {sampling.max_tokens}: at least 1 is needed")
        room = self._max_context - len(prompt)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room for a completion: "
                f"the context has {self._max_context} tokens"
            )
        if sampling.stop and self._batch.stop_text is None:
            raise ValueError(
                f"stop strings {sampling.stop} were asked for, but the engine has no stop_text to decode with"
            )
        return Request(prompt, sampling, min(sampling.max_tokens, room))

    async def _drive(self) -> None:
        """Decodes until nothing is left to do. A failure reaches everyone who waits."""
        try:
            await self._settle()
            while self._waiting:
                arrivals, self._arrivals = self._arrivals, []
                ended = await asyncio.to_thread(self._advance, arrivals)
                for request, choice in ended:
                    _, future = self._waiting.get(id(request), (request, None))
                    if future is not None and not future.done():
                        future.set_result(choice)
                if ended:
                    await self._settle()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    async def _settle(self) -> None:
        """Lets everything that is ready hand in its requests, so that what is batched does not depend on the clock."""
        quiet, seen = 0, len(self._arrivals)
        while quiet < _SETTLE:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._arrivals) == seen else 0
            seen = len(self._arrivals)

    def _advance(self, arrivals: list[Request]) -> list[tuple[Request, Choice]]:
        with self._lock:
            if self._broken:
                self._batch.clear()
                self._broken = False
            self._batch.pending += arrivals
            return self._batch.step()

    def _fail(self, error: BaseException) -> None:
        self._broken = True
        self._arrivals = []
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error if isinstance(error, Exception) else RuntimeError("the sampler was stopped"))
        self._waiting = {}
