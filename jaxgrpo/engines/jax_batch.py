"""Continuous batching on the host, step by step: seats requests, runs the programs, cuts what has ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.engines.jax_cache import Capacity, Slots, State
from jaxgrpo.engines.jax_generate import Programs, capacity_of
from jaxgrpo.engines.jax_layout import Cost, Prompt, Request, Row, bucket, places, rearranged, relayout
from jaxgrpo.engines.jax_sampling import Features, Settings
from jaxgrpo.models.decoder import Params
from jaxgrpo.rollout.engine import Choice, FinishReason

_LEAST_PROMPT = 32  # tokens: smallest bucket of a prompt
_LEAST_COMPLETION = 16
_FIRST_COMPLETION = 64  # tokens a completion gets room for at first; room grows as it is needed
_LEAST_STOPS = 4


@dataclass
class Stats:
    """Counters since the engine was made.

    Attributes:
        requests: completions delivered.
        prompts: prompts computed; those of a group count once.
        prompt_tokens, sampled_tokens: tokens computed in prompts, tokens drawn and delivered.
        decode_steps: steps of the whole batch.
        slot_steps, active_slot_steps: slots computed, and those of them that held a sequence.
        prefill_seconds, decode_seconds: wall-clock, compilation included.
        layouts: times the batch changed its shape.
    """

    requests: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    decode_steps: int = 0
    slot_steps: int = 0
    active_slot_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    layouts: int = 0


class Batch:
    """The sequences under way and their state on the device. Not thread-safe; `JaxEngine` serialises its use.

    Args:
        programs: the compiled functions.
        slots: sequences decoded at once, at most.
        steps: tokens drawn in one call of the device before the host looks at them.
        prefill_tokens: prompt tokens, padding included, of one prefill.
        step_cost: the part of a decode step's time that does not depend on its slots, in units of one slot's share.
        operations_per_byte: arithmetic operations in the time of reading one byte of cache.
        stop_text: decodes token ids, for stop strings.
    """

    def __init__(
        self,
        programs: Programs,
        *,
        slots: int,
        steps: int,
        prefill_tokens: int,
        step_cost: float,
        operations_per_byte: float,
        stop_text: Callable[[tuple[int, ...]], str] | None,
    ):
        self.programs, self.slots, self.steps = programs, slots, steps
        self.prefill_tokens, self.step_cost, self.operations_per_byte = prefill_tokens, step_cost, operations_per_byte
        self.stop_text = stop_text
        self.stats = Stats()
        self.params: Params | None = None
        self.version = -1
        self._slot_operations = 1.0
        self.pending: list[Request] = []
        self.rows: list[Row] = []
        self._state: State | None = None
        self._features = Features()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.pending) or any(row.active for row in self.rows)

    def load(self, params: Params, version: int) -> None:
        """Takes new weights. Sequences under way go on with them; stored prompts serve those sequences only."""
        self.params, self.version = self.programs.prepare(params), version
        self._slot_operations = 2.0 * sum(leaf.size for leaf in jax.tree.leaves(params))
        for row in self.rows:
            # Token ids are not negative: what the old weights computed matches no prompt to come.
            row.prompt = (-1, *row.prompt) if row.active and row.prompt else None

    def clear(self) -> None:
        """Forgets all sequences and the device state (after a failure half-way, when donated buffers may be gone)."""
        self.pending, self.rows, self._state = [], [], None

    def step(self) -> list[tuple[Request, Choice]]:
        """Seats what waits, draws `steps` tokens in every sequence, returns those that ended."""
        if self.params is None:
            raise RuntimeError("the sampler has no weights: call load(params, version) before generate")
        for row in self.rows:
            row.slots = [None if request is None or request.cancelled else request for request in row.slots]
        self.pending = [request for request in self.pending if not request.cancelled]
        ended = []
        started = time.perf_counter()
        seats = self._seat()
        if seats:
            ended += self._deliver(*self._admit(seats))
            self.stats.prefill_seconds += time.perf_counter() - started
        live = np.array([[request is not None for request in row.slots] for row in self.rows])
        if not live.any():
            return ended
        started = time.perf_counter()
        self._make_room(self._capacity(self.rows), None)
        state, tokens, logprobs = self.programs.decode(
            self.params, self._state, live, steps=self.steps, features=self._features
        )
        self._state = state
        drawn = self.stats.sampled_tokens
        ended += self._deliver(np.asarray(tokens), np.asarray(logprobs), live)
        self.stats.decode_seconds += time.perf_counter() - started
        self.stats.decode_steps += self.steps
        self.stats.slot_steps += live.size * self.steps
        self.stats.active_slot_steps += self.stats.sampled_tokens - drawn
        return ended

    def _seat(self) -> list[tuple[Request, int, int]]:
        """Gives waiting requests their seats, in another layout where that pays; computes and copies prompts."""
        if not self.busy:
            return []
        cost = Cost(self.step_cost, self._row_cost())
        shape = relayout(self.rows, self.pending, self.slots, cost)
        source = None
        if shape is not None:
            self.stats.layouts += 1
            self.rows, *source = rearranged(self.rows, *shape)
        seats = list(places(self.rows, self.pending))
        seated = {id(request) for request, _, _ in seats}
        self.pending = [request for request in self.pending if id(request) not in seated]
        carried = any(row.active for row in self.rows)
        taken: dict[int, Prompt] = {}
        for request, row, slot in seats:
            if self.rows[row].prompt != request.prompt:
                taken[row] = self.rows[row].prompt = request.prompt
            self.rows[row].slots[slot] = request
        used = Features.of(request.sampling for request, _, _ in seats)
        # What was compiled for some sequence stays in use until all have ended: fewer programs.
        self._features = Features(*map(max, used, self._features)) if carried else used
        capacity = self._capacity(self.rows)
        if shape is not None and not carried:
            self._state = self.programs.empty(capacity)
        else:
            self._make_room(capacity, source)
        self._compute_prompts(taken)
        return seats

    def _row_cost(self) -> float:
        """Reading the prompt of a row once, in slots."""
        config = self.programs.decoder.config
        tokens = max((len(r.prompt) for r in [*self._active(), *self.pending]), default=0)
        size = np.dtype(self.programs.decoder.compute_dtype).itemsize
        read = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size * bucket(tokens, _LEAST_PROMPT)
        return read * self.operations_per_byte / self._slot_operations

    def _active(self) -> Iterable[Request]:
        return (request for row in self.rows for request in row.slots if request is not None)

    def _capacity(self, rows: Sequence[Row]) -> Capacity:
        """Room for what sits in `rows` during the next call; sizes only grow while the layout stays."""
        active = list(self._active())
        # A token's keys and values are stored when it is fed, so the last one's never are.
        need = max(min(len(r.token_ids) + self.steps + 1, r.limit) for r in active)
        limit = max(r.limit for r in active)
        prompt = bucket(max(len(r.prompt) for r in active), _LEAST_PROMPT)
        completion = bucket(min(limit, max(_FIRST_COMPLETION, need)), _LEAST_COMPLETION)
        stops = bucket(max(len(r.sampling.stop_token_ids) for r in active), _LEAST_STOPS)
        if self._state is not None:
            now = capacity_of(self._state)
            if need > now.completion:
                completion = min(2 * now.completion, bucket(limit, _LEAST_COMPLETION))
            prompt, completion, stops = max(prompt, now.prompt), max(completion, now.completion), max(stops, now.stops)
        return Capacity(len(rows), rows[0].width, prompt, completion, stops)

    def _make_room(self, capacity: Capacity, source: tuple[list[int], list[list[int]]] | None) -> None:
        """Moves the state into another layout or larger sizes, if it has not got them."""
        assert self._state is not None
        if source is None and capacity == capacity_of(self._state):
            return
        rows, slots = source or (range(capacity.rows), np.arange(capacity.rows * capacity.width))
        slots = np.asarray(slots).reshape(capacity.rows, capacity.width)
        self._state = self.programs.move(self._state, np.asarray(rows), slots, capacity)

    def _compute_prompts(self, taken: dict[int, Prompt]) -> None:
        """Fills the rows that take a new prompt: each distinct one is computed once, then copied."""
        holder = {row.prompt: index for index, row in enumerate(self.rows) if index not in taken and row.prompt}
        wanted: list[tuple[int, Prompt]] = []
        copies: list[tuple[int, int]] = []
        for row, prompt in taken.items():
            if prompt in holder:
                copies.append((holder[prompt], row))
            else:
                holder[prompt] = row
                wanted.append((row, prompt))
        by_length: dict[int, list[tuple[int, Prompt]]] = {}
        for row, prompt in wanted:
            by_length.setdefault(bucket(len(prompt), _LEAST_PROMPT), []).append((row, prompt))
        for length, prompts in by_length.items():
            while prompts:
                count = _chunk(len(prompts), max(1, self.prefill_tokens // length))
                self._prefill(prompts[:count], count if count <= len(prompts) else bucket(count), length)
                prompts = prompts[count:]
        if copies:
            size = bucket(len(copies))
            source, target = np.zeros(size, np.int32), np.full(size, len(self.rows), np.int32)
            source[: len(copies)], target[: len(copies)] = zip(*copies, strict=True)
            self._state = self.programs.copy(self._state, source, target)

    def _prefill(self, prompts: list[tuple[int, Prompt]], count: int, length: int) -> None:
        tokens = np.zeros((count, length), np.int32)
        lengths, rows = np.ones(count, np.int32), np.full(count, len(self.rows), np.int32)
        for index, (row, prompt) in enumerate(prompts):
            tokens[index, : len(prompt)] = prompt
            lengths[index], rows[index] = len(prompt), row
            self.stats.prompt_tokens += len(prompt)
        self.stats.prompts += len(prompts)
        self._state = self.programs.prefill(self.params, self._state, tokens, lengths, rows)

    def _admit(self, seats: list[tuple[Request, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Starts the seated requests; returns their first tokens and log-probs [1, P, W], and which slots they are."""
        assert self._state is not None
        capacity = capacity_of(self._state)
        shape = (capacity.rows, capacity.width)
        taken, remaining = np.zeros(shape, bool), np.zeros(shape, np.int32)
        stop_ids, settings = np.full((*shape, capacity.stops), -1, np.int32), Settings.neutral(*shape)
        for request, *at in seats:
            index = tuple(at)
            taken[index], remaining[index] = True, request.limit
            stops = request.sampling.stop_token_ids
            stop_ids[index][: len(stops)] = stops
            settings.put(index, request.sampling)
        prompts = self._prepare_penalties(capacity)
        zeros = np.zeros(shape, np.int32)
        slots = Slots(zeros, zeros, remaining, stop_ids, settings)
        self._state, token, logprob = self.programs.admit(
            self.params, self._state, taken, slots, prompts, features=self._features
        )
        return np.asarray(token)[None], np.asarray(logprob)[None], taken

    def _prepare_penalties(self, capacity: Capacity) -> np.ndarray | None:
        """Keeps token counts on the device while some sequence has penalties; returns the prompts of all rows then."""
        assert self._state is not None
        if not self._features.penalties:
            self._state = replace(self._state, counts=None, prompt_seen=None)
            return None
        if self._state.counts is None:
            vocabulary = self.programs.decoder.config.vocab_size
            counts = jnp.zeros((capacity.rows, capacity.width, vocabulary), jnp.int32)
            self._state = replace(self._state, counts=counts, prompt_seen=jnp.zeros((capacity.rows, vocabulary), bool))
        prompts = np.full((capacity.rows, capacity.prompt), -1, np.int32)
        for index, row in enumerate(self.rows):
            member = next((request for request in row.slots if request is not None), None)
            if member is not None:
                prompts[index, : len(member.prompt)] = member.prompt
        return prompts

    def _deliver(self, tokens: np.ndarray, logprobs: np.ndarray, live: np.ndarray) -> list[tuple[Request, Choice]]:
        """Books what was drawn [n, P, W] in the `live` sequences, empties the slots of those that ended."""
        ended = []
        for row, slot in zip(*np.nonzero(live), strict=True):
            request = self.rows[row].slots[slot]
            assert request is not None
            reason = self._book(request, tokens[:, row, slot].tolist(), logprobs[:, row, slot].tolist())
            if reason is not None:
                self.rows[row].slots[slot] = None
                self.stats.requests += 1
                ids, values, versions = tuple(request.token_ids), tuple(request.logprobs), tuple(request.versions)
                ended.append((request, Choice(ids, values, reason, versions)))
        return ended

    def _book(self, request: Request, tokens: list[int], logprobs: list[float]) -> FinishReason | None:
        """Appends tokens up to the end of the sequence; why it ended, or None."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"the sampler's logits are not finite: weights of version {self.version} have diverged"
                )
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            self.stats.sampled_tokens += 1
            if token in request.sampling.stop_token_ids or self._completes_stop(request):
                return "stop"
            if len(request.token_ids) >= request.limit:
                return "length"
        return None

    def _completes_stop(self, request: Request) -> bool:
        """Whether a stop string ends in the completion's last token.

        Only a tail of the completion is decoded: as many tokens as give more characters than the longest stop string.
        """
        stops = request.sampling.stop
        if not stops:
            return False
        assert self.stop_text is not None
        longest, window = max(map(len, stops)), 16
        text = self.stop_text(tuple(request.token_ids[-window:]))
        while len(text) < longest + 8 and window < len(request.token_ids):
            window *= 2
            text = self.stop_text(tuple(request.token_ids[-window:]))
        return any(stop in text for stop in stops)


def _chunk(waiting: int, most: int) -> int:
    """How many prompts to compute at once: a power of two, so that few shapes are compiled and no row is empty."""
    return 1 << (min(waiting, most).bit_length() - 1)
