"""The only bridge between text and tokens: prompts in, completions out. Sampled ids are never encoded again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxgrpo.errors import Problem, UserError
from jaxgrpo.types.rollout import Message, Prompt

_PREFILL = re.compile(r"(?:<(think|thinking|thought|reasoning|scratchpad|answer)>\s*(?:</\1>\s*)?)+\Z")
_HELD = "\ue000{}\ue001"  # private-use characters: no template and no tokenizer gives them a meaning
_MARK = "\ue002"


class ChatTokenizer:
    """A model's tokenizer and chat template.

    Text that people wrote stays text: a user message that contains `<|im_end|>` is encoded letter by letter; only the
    template itself makes control tokens. (`prompt_format: text` is different: there the user writes the whole prompt.)

    Args:
        model_path: a local Hugging Face directory, or a hub name.
        template_options: extra variables for the template, such as `enable_thinking`.

    Raises:
        UserError: there is no tokenizer.
    """

    def __init__(self, model_path: str, template_options: Mapping[str, Any] | None = None):
        self.model_path = model_path
        self.template_options = dict(template_options or {})
        self._tokenizer = _load_tokenizer(model_path)
        specials = {
            token.content: index for index, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        self._control_ids = specials
        # Longest first, so that a token that begins with another one is found whole.
        names = sorted(specials, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names))) if names else re.compile(r"(?!)")

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The ids from which the model continues.

        A chat is rendered with the template up to where the assistant speaks. A text prompt is encoded as it is, with
        the begin token if the tokenizer adds one and the text does not start with it already.

        Raises:
            UserError: a chat, but the model has no template; or the template refuses the messages.
        """
        if prompt.text is not None:
            starts = self._tokenizer.bos_token and prompt.text.startswith(self._tokenizer.bos_token)
            return self._ids(prompt.text, add_special_tokens=not starts)
        held: list[str] = []
        messages = [_map_text(message, lambda text: self._hold(text, held)) for message in prompt.messages]
        return self._encode_rendered(self._render(messages, generation=True), held)

    def render_prompt(self, prompt: Prompt) -> str:
        """The text of `encode_prompt`, for people to look at."""
        return prompt.text if prompt.text is not None else self._render(prompt.messages, generation=True)

    def encode_turn(self, messages: Sequence[Message], last_id: int | None = None) -> list[int]:
        """The ids that follow a sampled assistant turn, up to where the assistant speaks again.

        They are what the template puts after an assistant message (its end token and separator), the new messages, and
        the opening of the next turn. Appended to the ids so far they keep every sampled id as it was, also under a
        template that would rewrite earlier turns.

        Args:
            messages: what was said since: tool results, user turns.
            last_id: the last sampled id. If it is an end token, the template's own end token is not put a second time.
        """
        held: list[str] = []
        dialogue = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
        dialogue += [_map_text(message, lambda text: self._hold(text, held)) for message in messages]
        rendered = self._render(dialogue, generation=True)
        if rendered.count(_MARK) != 1:
            raise UserError(self._template_problem("a template that shows the content of an assistant message once"))
        after = rendered[rendered.index(_MARK) + len(_MARK) :]
        end = self._control.match(after.lstrip(" "))
        if last_id in self.eos_ids and end and self._control_ids[end.group()] in self.eos_ids:
            after = after.lstrip(" ")[end.end() :]
        return self._encode_rendered(after, held)

    def decode(self, ids: Iterable[int]) -> str:
        """A completion's text, special tokens left out. The one place where they are."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def prefill(self, prompt: Prompt) -> str:
        """What the prompt already opens of the assistant's turn, such as `<think>`; empty when it opens nothing."""
        found = _PREFILL.search(self.render_prompt(prompt))
        return found.group() if found else ""

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template."""
        return bool(self._tokenizer.chat_template)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn, sorted: the tokenizer's, those of `generation_config.json` and `config.json`, and
        the control token the template puts after an assistant message."""
        found = {self._tokenizer.eos_token_id, self._end_of_turn}
        for name in ("generation_config.json", "config.json"):
            config = _read_json(self.model_path, name)
            for source in (config, config.get("text_config") or {}):
                value = source.get("eos_token_id")
                found |= set(value) if isinstance(value, list) else {value}
        return tuple(sorted(found - {None}))

    @cached_property
    def append_only(self) -> bool:
        """Whether the template renders a longer dialogue as a continuation of the shorter one.

        False for templates that drop the thinking of earlier turns: a history must then be grown by `encode_turn` (as
        episodes do), never rendered anew.
        """
        thought = "<think>\na\n</think>\n\nb"
        short = [{"role": "user", "content": "q"}, {"role": "assistant", "content": thought}]
        longer = [*short, {"role": "user", "content": "r"}, {"role": "assistant", "content": "c"}]
        return self._render(longer, generation=False).startswith(self._render(short, generation=False).rstrip())

    @cached_property
    def _end_of_turn(self) -> int | None:
        if not self.has_template:
            return None
        dialogue = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
        after = self._render(dialogue, generation=False).rpartition(_MARK)[2]
        end = self._control.match(after.lstrip())
        return self._control_ids[end.group()] if end else None

    def _render(self, messages: Sequence[Message], generation: bool) -> str:
        if not self.has_template:
            raise UserError(
                Problem(
                    "data.prompt_format",
                    f"'chat', but {self.model_path} has no chat template",
                    "a tokenizer with a chat template",
                    "set data.prompt_format: text, or add chat_template.jinja to the model",
                )
            )
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation, **self.template_options
            )
        except jinja2.TemplateError as error:
            raise UserError(self._template_problem(f"messages the chat template accepts; it says: {error}")) from error

    def _template_problem(self, expected: str) -> Problem:
        return Problem(f"chat template of {self.model_path}", "", expected, "change the messages, or the template")

    def _hold(self, text: str, held: list[str]) -> str:
        """Takes the control tokens out of a person's text; `_encode_rendered` puts them back as text."""

        def hold(match: re.Match[str]) -> str:
            held.append(match.group())
            return _HELD.format(len(held) - 1)

        return self._control.sub(hold, text)

    def _encode_rendered(self, rendered: str, held: Sequence[str]) -> list[int]:
        if not held:
            return self._ids(rendered, add_special_tokens=False)
        # Rare: some text looks like control tokens. Encode piece by piece between the real ones, as tokenizers do.
        ids: list[int] = []
        begin = 0
        for match in [*self._control.finditer(rendered), None]:
            piece = rendered[begin : match.start() if match else len(rendered)]
            for index, text in enumerate(held):
                piece = piece.replace(_HELD.format(index), text)
            if piece:
                ids += self._ids(piece, add_special_tokens=False, split_special_tokens=True)
            if match:
                ids.append(self._control_ids[match.group()])
                begin = match.end()
        return ids

    def _ids(self, text: str, **options: bool) -> list[int]:
        return list(self._tokenizer(text, **options)["input_ids"])


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Applies `change` to every string inside a message but its role."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {k: v if k == "role" else _map_text(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(item, change) for item in value]
    return value


def _load_tokenizer(model_path: str) -> Any:
    directory = Path(model_path)
    if not directory.is_dir() and (directory.is_absolute() or model_path.count("/") != 1):
        raise UserError(
            Problem("model.path", repr(model_path), "a directory that exists, or a hub name", "check the path")
        )
    # Without torch, which a tokenizer does not need, transformers advises to install it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=directory.is_dir())
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        expected = (
            "a directory with a tokenizer" if directory.is_dir() else "a directory that exists, or a hub name in reach"
        )
        raise UserError(Problem("model.path", repr(model_path), f"{expected} ({reason})", "check the path")) from error


def _read_json(model_path: str, name: str) -> dict[str, Any]:
    """A JSON file of the model; empty when the model has none."""
    file: str | Path | None = Path(model_path) / name
    if not Path(model_path).is_dir():
        from transformers.utils import cached_file

        file = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
    if file is None or not Path(file).is_file():
        return {}
    return json.loads(Path(file).read_text(encoding="utf-8"))
