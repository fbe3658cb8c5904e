"""P65, P66: rows are read strictly, named when they are bad, counted when they are left out, and kept whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxgrpo.config.schema import DataSection
from jaxgrpo.data.prompts import MAX_SHOWN, load_prompts
from jaxgrpo.errors import UserError

GOOD = json.dumps({"prompt": "2+2?", "answer": "4"})


def write(folder: Path, *lines: str | bytes, name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n")
    return str(file)


def load(path: str | list[str], encode=None, **options):
    return load_prompts(DataSection(train=path, **options), "train", encode)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "a JSON object"),
        ('["a", "list"]', "a list"),
        ('"text"', "a str"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands twice"),
        ('{"prompt": "a", "x": NaN}', "NaN is not JSON"),
        (b'{"prompt": "\xff"}', "byte 0xff at column 13"),
        ('{"answer": "4"}', "no prompt"),
        ('{"prompt": null}', "null"),
        ('{"prompt": 7}', "a int in the column 'prompt'"),
        ('{"prompt": "  "}', "an empty prompt"),
        ('{"prompt": []}', "an empty list of messages"),
        ('{"prompt": ["hi"]}', "a str"),
        ('{"prompt": [{"role": "robot", "content": "hi"}]}', "role 'robot'"),
        ('{"prompt": [{"role": "user", "content": 5}]}', "content of type int"),
        (
            '{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}',
            "ends with an assistant message",
        ),
    ],
)
def test_bad_row_names_file_line_and_reason_or_is_counted(tmp_path: Path, line: str | bytes, reason: str) -> None:
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(UserError) as raised:
        load(path)
    assert f"{path}:2" in str(raised.value) and reason in str(raised.value)
    kept = load(path, skip_invalid=True)
    assert kept.counts == {"read": 3, "kept": 2, "invalid": 1, "overlong": 0}
    assert reason in str(kept.problems[0])


def test_what_is_no_mistake(tmp_path: Path) -> None:
    separator = json.dumps({"prompt": "a\u2028b", "answer": "x"}, ensure_ascii=False)
    path = write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode(), "", separator, GOOD + "\r")
    prompts = load(path)
    assert prompts.counts["read"] == 3
    assert prompts.prompts[1].messages == ({"role": "user", "content": "a\u2028b"},)


def test_many_bad_rows_are_counted_and_the_first_shown(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, *["oops"] * 50)
    with pytest.raises(UserError) as raised:
        load(path)
    assert len(raised.value.problems) == MAX_SHOWN + 1
    assert "50 invalid of 51 rows" in str(raised.value.problems[-1])


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    for path in (write(tmp_path, "", name="empty.jsonl"), write(tmp_path, "oops", name="bad.jsonl")):
        with pytest.raises(UserError, match="at least one row"):
            load(path, skip_invalid=True)


def test_absent_prompt_column_is_one_problem_with_the_columns_present(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load(write(tmp_path, *['{"question": "q", "answer": "a"}'] * 30))
    (problem,) = raised.value.problems
    assert problem.path == "data.prompt_column" and "question, answer" in problem.expected


def test_columns_of_all_rows_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, '{"prompt": "b", "level": 3, "tags": ["x"]}')
    prompts = load(path)
    assert prompts.columns == ("answer", "level", "tags")
    assert prompts.prompts[0].columns == {"answer": "4", "level": None, "tags": None}
    assert prompts.prompts[1].columns == {"answer": None, "level": 3, "tags": ["x"]}


def test_ids_belong_to_rows_not_places(tmp_path: Path) -> None:
    other = json.dumps({"prompt": "3+3?", "answer": "6"})
    same_prompt = json.dumps({"prompt": "2+2?", "answer": "5"})
    first = load(write(tmp_path, GOOD, other, same_prompt, GOOD)).prompts
    second = load(write(tmp_path, other, GOOD, name="again.jsonl")).prompts
    assert first[0].prompt_id == second[1].prompt_id and first[1].prompt_id == second[0].prompt_id
    assert len({p.prompt_id for p in first}) == 4


def test_parquet_datasets_and_directories_give_the_same_rows(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": f"q{i}", "answer": i} for i in range(5)]
    jsonl = write(tmp_path, *map(json.dumps, rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "splits")
    wanted = load(jsonl).prompts
    for name in ("rows.parquet", "saved", "splits"):
        assert load(str(tmp_path / name)).prompts == wanted
    held_out = load_prompts(DataSection(train="-", eval=str(tmp_path / "splits")), "eval")
    assert held_out.prompts == wanted[:1]
    assert len(load([jsonl, str(tmp_path / "rows.parquet")]).prompts) == 10


@pytest.mark.parametrize("path", ["nowhere.jsonl", "no/such/dir", "data/rows.jsonl"])
def test_missing_path(path: str) -> None:
    with pytest.raises(UserError, match="exists"):
        load(path)


def test_overlong_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, json.dumps({"prompt": "x" * 50}))

    def count(prompt):
        return list(prompt.messages[-1]["content"])

    with pytest.raises(UserError, match=r":2: found a prompt of 50 tokens"):
        load(path, count, max_prompt_tokens=10)
    kept = load(path, count, max_prompt_tokens=10, overlong_prompts="skip")
    assert kept.counts == {"read": 2, "kept": 1, "invalid": 0, "overlong": 1}


def test_text_prompts_and_system_prompt(tmp_path: Path) -> None:
    chat = json.dumps({"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]})
    path = write(tmp_path, GOOD, chat)
    prompts = load(path, system_prompt="be brief").prompts
    assert [m["content"] for m in prompts[0].messages] == ["be brief", "2+2?"]
    assert [m["content"] for m in prompts[1].messages] == ["own", "q"]
    text = load(write(tmp_path, GOOD, name="t.jsonl"), prompt_format="text").prompts[0]
    assert text.text == "2+2?" and text.messages == ()
