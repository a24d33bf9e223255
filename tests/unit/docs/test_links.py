"""Every link of every page leads somewhere."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.unit.docs.markdown import ROOT, anchors, links, pages

HOST = re.compile(r"(localhost|([a-z0-9-]+\.)+[a-z]{2,})(:\d+)?")


def wrong(page: Path, link: str) -> str | None:
    """What is wrong with a link; None if nothing is."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        if parts.scheme == "mailto":
            return None
        if parts.scheme not in ("http", "https") or not HOST.fullmatch(parts.netloc):
            return "is no address"
        return "has a blank" if re.search(r"\s", link) else None
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(ROOT):
        return "leads out of the tree"
    if not target.exists():
        return "leads nowhere"
    if parts.fragment and (target.suffix != ".md" or parts.fragment not in anchors(target)):
        return "has an anchor that is not there"
    return None


def test_links_lead_somewhere() -> None:
    found = ((page, link, wrong(page, link)) for page in pages() for link in links(page))
    assert [f"{page.relative_to(ROOT)}: {link} {why}" for page, link, why in found if why] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    start = ROOT / "README.md"
    seen, coming = {start}, [start]
    while coming:
        page = coming.pop()
        for link in links(page):
            parts = urlsplit(link)
            target = (page.parent / unquote(parts.path)).resolve()
            if not parts.scheme and target.suffix == ".md" and target.exists():
                coming += [target] if target not in seen else []
                seen.add(target)
    # GitHub shows the template of a pull request by itself.
    unknowns = {str(page.relative_to(ROOT)) for page in pages() if page not in seen}
    assert unknowns - {".github/pull_request_template.md"} == set()
