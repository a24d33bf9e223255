import json
import re
from pathlib import Path

import pytest

from mps_exporter import manual_search
from mps_exporter.findings import ADVICE

TYPED = json.loads(Path(__file__).with_name("typed.json").read_text("utf-8"))
"""How the name of a page begins -> what people type for it, in public threads, too."""
NOTHING = TYPED.pop("nothing")  # Texts that no page is about.


@pytest.mark.parametrize(
    ("typed", "name"), [(text, name) for name in TYPED for text in TYPED[name]]
)
def test_what_people_type_finds_its_page_first(typed: str, name: str) -> None:
    assert manual_search.search(typed)[0].name.startswith(name)


@pytest.mark.parametrize("text", NOTHING)
def test_what_no_page_is_about_is_not_found(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert manual_search.search(text) == []
    assert manual_search.explain(text) == 1
    assert "Nothing in the manual" in capsys.readouterr().out


def test_pages_with_some_words_are_named_as_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        manual_search.explain("chroot: failed to run command 'sh': No such file or directory") == 1
    )
    assert "Pages with some of its words" in capsys.readouterr().out


@pytest.mark.parametrize("name", ADVICE)
def test_each_finding_has_its_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    advice = ADVICE[name]
    page = manual_search.name_of(advice.runbook_url or advice.docs_url)
    found = manual_search.explain(name)
    begins = (
        f"# {advice.title}\n\n{advice.why}"
        if page is None
        else manual_search.pages()[page].text[:40]
    )
    assert capsys.readouterr().out.startswith(begins)
    assert found == 0


@pytest.mark.parametrize("page", manual_search.pages().values(), ids=lambda page: page.name)
def test_title_and_link_find_a_page(
    page: manual_search.ManualPage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert manual_search.search(page.title)[0] == page
    assert manual_search.explain(f"https://w.example/{page.name}.md") == 0
    assert capsys.readouterr().out.startswith(f"# {page.title}\n")


def test_links_of_a_page_lead_to_pages_or_to_the_web() -> None:
    for page in manual_search.pages().values():
        for target in re.findall(r"\]\(([^)#]+)", page.text):
            assert target in manual_search.pages() or target.startswith("http"), (page.name, target)
        assert "<!--" not in page.text


def test_a_file_that_was_not_unpacked_has_no_manual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual_search, "_place", Path(__file__).joinpath)
    assert manual_search.pages.__wrapped__() == {}
