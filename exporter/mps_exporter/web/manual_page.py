"""The manual as web pages: /docs/ lists the pages, /docs/NAME is one of them."""

from functools import cache

from aiohttp import web

from mps_exporter import manual

_TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="../static/icon.svg">
<link rel="stylesheet" href="../static/status.css"></head>
<body class="manual"><p><a href="../">This host</a> · <a href="./">All pages</a></p>
<main>{{ body | safe }}</main></body></html>
"""
_INDEX = "# Manual\n\n## Error texts and hangs\n\n{}\n\n## Alerts\n\n{}\n\n## FAQ\n\n{}\n"


@cache
def _render(name: str) -> str:
    """Return a page of the manual, or for "" the list of all, as HTML."""
    import jinja2  # late: both take memory, and most exporters serve no page
    import mistune

    pages = manual.pages()
    lists = (
        "\n".join(f"- [{one.title}]({one.name})" for one in pages.values() if one.folder == each)
        for each in (*manual.FOLDERS, manual.FAQ)
    )
    text = pages[name].text if name else _INDEX.format(*lists)
    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE)
    body = str(mistune.create_markdown(plugins=["table"])(text))
    return template.render(title=pages[name].title if name else "Manual", body=body)


async def manual_page(request: web.Request) -> web.Response:
    """Return a page of the manual, at /docs/ the list of all."""
    name = request.match_info.get("name", "")
    if name and name not in manual.pages():
        raise web.HTTPNotFound
    return web.Response(text=_render(name), content_type="text/html", charset="utf-8")
