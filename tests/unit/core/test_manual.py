from __future__ import annotations

import re

import pytest

from mps_exporter import manual
from mps_exporter.commands.explain import explain
from mps_exporter.findings import ADVICE


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("MPS client failed to connect to the MPS control daemon", "cuda-error-805"),
        ("RuntimeError: CUDA error: MPS client failed to connect (PID 4711)", "cuda-error-805"),
        ("the MPS server is not ready to accept new MPS client requests", "cuda-error-807"),
        ("all CUDA-capable devices are busy or unavailable", "cuda-error-46"),
        ("torch.cuda.is_available() hangs", "a-program-hangs-in-cuinit"),
        ("cuda mps out of memory but nvidia-smi shows free", "cuda-error-2-out-of-memory"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE not working", "a-limit-has-no-effect"),
        ("nvidia-cuda-mps-control quit hangs", "quit-does-not-return"),
        ("809", "cuda-error-808-809"),
        ("MpsGhostServer", "MpsGhostServer"),
        ("mpsghostserver", "MpsGhostServer"),
        (
            "Traceback (most recent call last):\n  File 'train.py', line 7, in <module>\n"
            "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
            "cuda-error-46",
        ),
        ("x.cu:12: my_check() failed with CUDA_ERROR_MPS_RPC_FAILURE, giving up", "cuda-error-806"),
        (
            "daemon-ctr printed: Server 4711 exited with status 1, restarting it",
            "server-encountered",
        ),
    ],
)
def test_what_people_type_finds_its_page_first(typed: str, name: str) -> None:
    assert manual.search(typed)[0].name.startswith(name)


@pytest.mark.parametrize("text", ["xyzzy", "", "4711", "libfoo.so.1"])
def test_what_no_page_is_about_is_not_found(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert manual.search(text) == []
    assert explain(text) == 1
    assert "Nothing in the manual" in capsys.readouterr().out


@pytest.mark.parametrize("name", ADVICE)
def test_each_finding_has_its_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    advice = ADVICE[name]
    page = manual.name_of(advice.runbook_url or advice.docs_url)
    found = explain(name)
    begins = f"# {advice.title}\n\n{advice.why}" if page is None else manual.pages()[page].text[:40]
    assert capsys.readouterr().out.startswith(begins)
    assert found == 0


def test_links_of_a_page_lead_to_pages_or_to_the_web() -> None:
    for page in manual.pages().values():
        for target in re.findall(r"\]\(([^)#]+)", page.text):
            assert target in manual.pages() or target.startswith("http"), (page.name, target)
        assert "<!--" not in page.text
