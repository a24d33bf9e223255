"""Pages and alerts end only processes that are proved dead or responsible.

tests/integration/test_no_healthy_client_is_ended.py checks the texts about recorded hosts.
"""

import re

from testing.each import each
from testing.rule_files import RUNBOOKS, alert_cases
from tests.unit.docs.markdown import ROOT

ENDS = re.compile(
    r"(?:^|[.:;|,(] *|\b(?:then|also|and|or) )\**`?(?:end|kill(?! -CONT)|terminate) (?!no|neither)",
    re.MULTILINE | re.IGNORECASE,
)
FORBIDS = re.compile(r"\b(?:not|never|cannot)(?: to)? (?:end|kill|terminate)\b", re.IGNORECASE)
MAY_BE_ENDED = re.compile(
    r"ghost|torn[_ ]down|tore down|stranded|last resort|terminate_client", re.IGNORECASE
)
"""A daemon or a server only as a last resort, which names what is lost with it. terminate_client
is for jobs that their owner ends anyway."""

PAGES = sorted(
    [
        *RUNBOOKS.glob("*.md"),
        *(ROOT / "docs" / "symptoms").glob("[!r]*.md"),
        *(ROOT / f"docs/{name}.md" for name in ("troubleshooting", "faq", "sharing", "alerts")),
        ROOT / "README.md",
    ]
)


def unproved(text: str) -> list[str]:
    """The paragraphs, points and rows that end something, and do not say that it may be ended."""
    text = re.sub(r"```text.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    parts = re.split(r"\n\n(?! )|\n(?=[|#]|- |\d+\. )", text)
    joined = [" ".join(part.split()) for part in parts]
    return [
        part
        for part in joined
        if ENDS.search(FORBIDS.sub("", part)) and not MAY_BE_ENDED.search(part)
    ]


@each(PAGES)
def test_a_page_ends_only_what_may_be_ended(page: object) -> None:
    assert unproved((ROOT / str(page)).read_text("utf-8")) == []


def test_an_alert_ends_only_what_may_be_ended() -> None:
    told = {
        alert["exp_annotations"]["description"] for case in alert_cases() for alert in case.expected
    }
    assert len(told) > 40
    assert [text for text in sorted(told) if unproved(text)] == []
