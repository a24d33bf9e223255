"""``mps-exporter explain``: finds an error text in the manual and prints its page."""

from mps_exporter import manual
from mps_exporter.findings import ADVICE
from mps_exporter.logging import print_output


def explain(text: str) -> int:
    """Print the page about a text, and the names of further pages; return the exit status."""
    advice = ADVICE.get(text.strip())
    url = None if advice is None else advice.runbook_url or advice.docs_url
    page = manual.name_of(url)
    found = manual.search(page or text)
    status = 0 if found or advice else 1
    if advice is not None and page is None:
        print_output(f"# {advice.title}\n\n{advice.why}\n\nSee {url}\n")
    elif not found:
        print_output(
            f"Nothing in the manual is about {text!r}. Give the error text as it is printed, "
            "an alert, a finding or an error number.\nmps-exporter doctor checks this host.\n"
        )
        found = manual.search(text, most=3, wanted=manual.WANTED_SHARE / 2)
    else:
        print_output(found.pop(0).text.rstrip() + "\n")
    if found:
        others = "".join(f"  {page.name}: {page.title}\n" for page in found)
        print_output(f"\nFurther pages (mps-exporter explain NAME):\n{others}")
    return status
