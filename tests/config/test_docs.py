"""docs/config.md is what the schema says."""

from __future__ import annotations

import runpy
from pathlib import Path

from jaxgrpo.config.fields import section_type, sections

ROOT = Path(__file__).resolve().parents[2]


def test_config_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "make_config_docs.py"))
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == script["render"](), "run python scripts/make_config_docs.py"


def test_every_key_is_explained() -> None:
    silent = [
        f"{path}.{key}"
        for path, section in sections()
        for key, info in section.model_fields.items()
        if not info.description and section_type(info.annotation) is None
    ]
    assert not silent
    assert not [path for path, section in sections() if not section.__doc__]
