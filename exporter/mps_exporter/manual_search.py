"""The manual that the package contains: pages, their search, and ``mps-exporter explain``.

The pages are files in FOLDERS and sections of QUESTIONS; a package contains copies of these.
"""

import math
import posixpath
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

from mps_exporter.findings import ADVICE
from mps_exporter.findings.finding import DOCS
from mps_exporter.logging import print_output

FOLDERS = ("docs/symptoms", "prometheus/runbooks")
QUESTIONS = tuple(f"docs/{page}.md" for page in ("alerts", "slurm", "faq", "sharing", "under-mps"))
WANTED_SHARE = 0.3  # Minimum share of a text's words, weighted by rarity, that a page contains.
WANTED_EVIDENCE = 3.0  # Minimum evidence (heading and sequence) for a text on GPUs or MPS.
WANTED_CUDA = 5.2  # The same for a text that is only about CUDA or a library.
WANTED_HEADING = 3.4  # Minimum weight of a text whose words are all in the heading.
WANTED_RUN = 10.0  # Weight of evidence, or of a sequence without a subject, that suffices.

_TYPED = re.compile(r"(?<=<!-- typed: ).*?(?= -->)|\bCUDA_ERROR_\w+|\bcudaError\w+", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
_SECTION = re.compile(r"^### (.+?)(?=^##|\Z)", re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"[a-z0-9_]+")
_NUMBER = re.compile(r"\b\d+\b")
_IGNORED = re.compile(
    r"(?<=[a-z]{3})(?:e?(?<!s)s|es?|ed|ing|ly)\b|\b(?:about|also|an?|and|any|are|as|at|be|been|being"
    r"|both|but|by|can|could|did|do|does|each|for|from|get|had|has|have|he|here|how|i|if|in|into|is"
    r"|it|its|just|may|me|might|more|most|my|of|on|onto|or|other|our|should|so|some|such|than|that"
    r"|the|their|them|then|there|these|they|this|those|to|us|was|we|what|when|where|which|who"
    r"|will|with|would|you|your)\b"
)
_SUBJECT = re.compile(
    r"(gpu|(?<![a-z])mps|multiuser.server|time.slicing|\bmig\b)|cu(?:da|dnn|blas)|nv(?:idia|ml|link)"
    r"|nccl|torch|tensorrt|triton|rapids|\bjax|vllm|sglang|onnx|exclusive (?:device|mode|process)"
    r"|daemon-ctr|control daemon|active.thread|pinned_mem|\b(?:xid|ecc|sms?)\b"
    r"|\bkernels\b|\b[ahv][1238]00\b|\brtx|geforce|tesla|volta\b|jetson"
    r"|(?:new|legacy) (?:client|server)|client contexts?|compute mode|server \d"
)
"""Words about GPUs, CUDA or libraries. A text without them needs a title or a long sequence."""
_APPLE = re.compile(
    r"mps (?:backend|framework|tensor|allocated)|(?:the|on) mps device\b(?! pl)"
    r"|mps:0|ends\.mps|mps_fall|apple"
)
_ERROR_NUMBER = re.compile(
    r"\A(?:cuda )?(?:error )?(\d+)\Z|\bcuda error\W{1,3}(\d+)\b|\berror\W{1,3}(\d{3})\b"
)
FIRST = "what-is-mps-when-does-it-help-and-why-is-it-not-the-default"
APPLE = "is-pytorchs-device-mps-nvidias-mps"
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ERROR_NAME = re.compile("cuda_?error|cuda_mps_|nccl$|xid$")


@dataclass(frozen=True)
class ManualPage:
    """A page in Markdown."""

    name: str  # File name without suffix (of a runbook: the alert's name); anchor in QUESTIONS.
    folder: str  # Folder of the file; one of QUESTIONS for its sections.
    source: str

    @property
    def title(self) -> str:
        return self.source.partition("\n")[0].lstrip("# ")

    @property
    def text(self) -> str:
        """The page without comments; links lead to other pages of the manual, or to the web."""
        return _LINK.sub(self._absolute, _COMMENT.sub("", self.source))

    @cached_property
    def words(self) -> frozenset[str]:
        """Words of the page with its comments, of its name, and of its heading."""
        return frozenset(_words(f"{self.name} {self.source}")) | self.heading

    @cached_property
    def heading(self) -> frozenset[str]:
        """Words of the title, of the name, of what people type, and names of CUDA errors."""
        typed = " ".join(_TYPED.findall(self.source))
        return frozenset(_words(f"{self.title} {_CAPITAL.sub(' ', self.name)} {typed}"))

    @cached_property
    def sequence(self) -> str:
        return f" {' '.join(_words(_NUMBER.sub('', self.source)))} "

    def _absolute(self, found: re.Match[str]) -> str:
        base = self.folder.partition("/")[0] if self.folder in QUESTIONS else self.folder
        path, anchor = posixpath.normpath(posixpath.join(base, found[1])), found[2] or ""
        name = posixpath.basename(path).removesuffix(".md")
        if path in QUESTIONS and anchor[1:] in pages():
            return f"]({anchor[1:]})"
        return f"]({name}{anchor})" if name in pages() else f"]({DOCS}{path}{anchor})"


def _words(text: str) -> list[str]:
    return _WORD.findall(_IGNORED.sub("", text.lower()))


def _sequence(words: list[str], page: ManualPage, weights: dict[str, float]) -> float:
    """Return the weight of the heaviest sequence of two words or more that the page contains."""
    best, start = 0.0, 0
    for end in range(1, len(words) + 1):
        while start < end and f" {' '.join(words[start:end])} " not in page.sequence:
            start += 1
        if end - start > 1:
            best = max(best, sum(weights.get(word, 0.0) for word in words[start:end]))
    return best


def _place(name: str) -> Path:
    package = Path(__file__).parent / "manual" / name
    return package if package.exists() else Path(__file__).parents[2] / name


@cache
def pages() -> dict[str, ManualPage]:
    found = [
        ManualPage(file.stem, folder, file.read_text("utf-8"))
        for folder in FOLDERS
        for file in sorted(_place(folder).glob("*.md"))
        if file.stem != "README"
    ]
    for name in QUESTIONS:
        file = _place(name)  # not there in a .pyz that was not unpacked
        for text in _SECTION.findall(file.read_text("utf-8")) if file.is_file() else ():
            anchor = re.sub(r"[^\w -]", "", text.partition("\n")[0].lower()).replace(" ", "-")
            found.append(ManualPage(anchor, name, f"# {text}"))
    return {page.name: page for page in found}


def name_of(url: str | None) -> str | None:
    """Return the name of the page with this URL; None if the manual lacks it."""
    name = posixpath.basename(url or "").removesuffix(".md")
    return name if name in pages() else None


def search(text: str, most: int = 5, sure: bool = True) -> list[ManualPage]:
    """Return the pages about an error text, alert, finding or number, the best first.

    The best page has the text as its title, else word for word, else most of its rare words, in its
    title and in sequence (a message contains PIDs). Without `sure`, less similar pages count, too.
    """
    if APPLE in pages() and _APPLE.search(text.lower()):
        return [pages()[APPLE]]
    number = next(iter("".join(x) for x in _ERROR_NUMBER.findall(text.strip().lower())), "-")
    title = re.compile(rf"CUDA error (?:\d+ or )?{number}\b")
    asked, words = set(_words(text)), _words(_NUMBER.sub("", text))
    known = pages().values()
    counts = Counter(word for page in known for word in page.words)
    weights = {word: math.log(1 + len(known) / counts[word]) for word in asked if counts[word]}
    weights |= {word: 3 * weights[word] for word in weights if _ERROR_NAME.match(word)}
    missing = len({word for word in asked if not counts[word] and not word.isdecimal()})
    whole = sum(weights.values()) + missing * math.log(1 + len(known)) / 2
    ranked = []
    pairs = {f" {a} {b} ": weights.get(a, 0.0) + weights.get(b, 0.0) for a, b in pairwise(words)}
    subjects = [] if "amdgpu" in text.lower() else _SUBJECT.findall(text.lower())
    least = WANTED_EVIDENCE if any(subjects) else WANTED_CUDA
    for page in known:
        found = sum(weights[word] for word in page.words & weights.keys())
        titled = sum(weights[word] for word in page.heading & weights.keys())
        run = _sequence(words, page, weights)
        names = ";".join([page.name, page.title, *_TYPED.findall(page.source)]).split(";")
        named = bool(title.search(page.title)) or asked in [set(_words(name)) for name in names]
        exact = f" {' '.join(words)} " in page.sequence
        evidence = titled + run
        enough = evidence >= WANTED_RUN or (evidence >= least and found >= WANTED_SHARE * whole)
        paired = sum(weight for pair, weight in pairs.items() if pair in page.sequence)
        heads = asked <= page.heading and whole >= WANTED_HEADING
        perhaps = not sure and found >= WANTED_SHARE / 2 * whole > 0
        if named or heads or run >= WANTED_RUN or (subjects and enough) or perhaps:
            score = round(found + 2 * titled + run + 0.5 * paired, 6)  # sets have no order
            ranked.append(((named, exact, score, -len(page.words)), page))
    if not ranked and "mps" in asked and FIRST in pages():
        return [pages()[FIRST]]
    return [page for _, page in sorted(ranked, key=lambda one: one[0], reverse=True)[:most]]


def explain(text: str) -> int:
    """Print the page about a text, and the names of further pages; return the exit status."""
    if (words := text.split())[1:] and all(word in ADVICE or word in pages() for word in words):
        return max(map(explain, words))
    advice = ADVICE.get(text.strip())
    url = text.strip() if advice is None else advice.runbook_url or advice.docs_url
    page = name_of(url)
    found = search(page or text)
    status = 0 if found or advice else 1
    if advice is not None and page is None:
        print_output(f"# {advice.title}\n\n{advice.why}\n\nSee {url}\n")
    elif not found:
        print_output(
            f"Nothing in the manual is about {text!r}. Give the error text as it is printed, "
            "an alert, a finding or an error number.\nmps-exporter doctor checks this host.\n"
        )
        found = search(text, most=3, sure=False)
    else:
        print_output(found.pop(0).text.rstrip() + "\n")
    if found:
        others = "".join(f"  {page.name}: {page.title}\n" for page in found)
        which = "Further pages" if status == 0 else "Pages with some of its words"
        print_output(f"\n{which} (mps-exporter explain NAME):\n{others}")
    return status
