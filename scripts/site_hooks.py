# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: they write a Markdown twin of each page, and llms.txt.

A twin lies beside its page, has the same links, and has texts in place of what the page includes:
helps of commands, and docstrings.
"""

import contextlib
import re
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
TWINS: dict[str, str] = {}


def on_page_markdown(markdown, page, config, files):
    """Keep what a page says; tell Markdown no more of blocks than it understands."""
    text = re.sub(r'--8<-- "(.+)"', lambda found: (ROOT / found[1]).read_text("utf-8"), markdown)
    text = re.sub(r"^::: (\S+)$", lambda found: docstrings_of(found[1]), text, flags=re.M)
    TWINS[page.file.src_uri] = text
    plain = re.sub(r"^```python runnable$", "```python", markdown, flags=re.M)
    return re.sub(r"^```python file=(\S+)$", r'```python title="\1"', plain, flags=re.M)


def on_post_template(output_content, template_name, config):
    """Let the sitemap have the first page by its folder: from that the switch finds other pages."""
    if template_name == "sitemap.xml":
        return output_content.replace("/index.html</loc>", "/</loc>")
    return output_content


def on_post_build(config):
    """Write twins and llms.txt into the site."""
    site = Path(config["site_dir"])
    for path, text in TWINS.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text.rstrip() + "\n", "utf-8")
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for section in config["nav"]:
        ((title, pages),) = section.items()
        lines += [f"## {title}", "", *map(line_of, paths_of(pages)), ""]
    (site / "llms.txt").write_text("\n".join(lines), "utf-8")


def paths_of(entry) -> list[str]:
    """Return the pages of an entry of the navigation: a path, or a list or mapping of entries."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [path for part in inner for path in paths_of(part)]


def line_of(path: str) -> str:
    """Describe a page by its title and its first sentence."""
    title = re.search(r"^# (.+)$", TWINS[path], re.M)[1]
    prose = [part for part in TWINS[path].split("\n\n") if re.match(r"(?!```)[\w`*\[]", part)]
    first = re.match(r".+?[.:](?=\s|$)", prose[0].replace("\n", " ")) if prose else None
    return f"- [{title}]({path})" + (f": {first[0].rstrip(':')}" if first else "")


def docstrings_of(module: str) -> str:
    """Give the public names of a module with their docstrings."""
    package = griffe.load(module, search_paths=[str(ROOT / "src")], resolve_aliases=True)
    parts = [f"## {module}", package.docstring.value if package.docstring else ""]
    for name in package.exports or ():
        member = package[str(name)]
        with contextlib.suppress(griffe.AliasResolutionError):  # a name of another library
            parts += [f"### {name}", member.docstring.value if member.docstring else ""]
    return "\n\n".join(part for part in parts if part)
