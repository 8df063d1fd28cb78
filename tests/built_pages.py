"""The pages of a built site as a browser reads them: what they load, and where their links lead."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {  # attributes by which a browser fetches something without being asked to
    "audio": ["src"],
    "embed": ["src"],
    "iframe": ["src"],
    "image": ["href", "xlink:href"],
    "img": ["src", "srcset"],
    "input": ["src"],
    "object": ["data"],
    "script": ["src"],
    "source": ["src", "srcset"],
    "track": ["src"],
    "use": ["href", "xlink:href"],
    "video": ["src", "poster"],
}
LINKS_ONLY = {"canonical", "alternate", "next", "prev", "author", "license", "help", "search"}  # of <link>: not fetched
IN_STYLES = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")


class Page(HTMLParser):
    """One page: what it loads, the places that it links to, and the anchors in it."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], set()
        self.in_style = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.loads += in_styles(values.get("style", ""))
        self.in_style = tag == "style"
        if tag == "link" and not set(values.get("rel", "").split()) <= LINKS_ONLY:
            self.loads.append(values["href"])
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])
        for name in LOADED.get(tag, []):
            if name in values:
                addresses = values[name].split(",") if name == "srcset" else [values[name]]
                self.loads += [address.split()[0] for address in addresses if address.strip()]

    def handle_data(self, data):
        if self.in_style:
            self.loads += in_styles(data)
            self.in_style = False


def in_styles(text):
    """What a style sheet loads."""
    return [found[1] or found[2] for found in IN_STYLES.finditer(text)]


def read_pages(site):
    """All pages of a built site, by file."""
    return {file: Page(file.read_text(encoding="utf-8")) for file in sorted(Path(site).rglob("*.html"))}


def loaded_from_elsewhere(site):
    """Each thing that a browser would fetch from another machine, with the file that asks for it."""
    loads = {file: page.loads for file, page in read_pages(site).items()}
    loads |= {file: in_styles(file.read_text(encoding="utf-8")) for file in Path(site).rglob("*.css")}
    loads |= {file: Page(file.read_text(encoding="utf-8")).loads for file in Path(site).rglob("*.svg")}
    return [(file.name, address) for file, each in loads.items() for address in each if urlsplit(address).netloc]


def dead_ends(site):
    """Each link to a file or anchor that the site does not have, and each picture, script or style that it has not."""
    site = Path(site).resolve()
    pages = read_pages(site)
    dead = []
    for file, page in pages.items():
        for address in (*page.loads, *page.links):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            # The page for addresses that do not exist is shown at any of them: its own are from the root.
            start = site if parts.path.startswith("/") else file.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else file
            anchors = pages[target].anchors if target in pages else {unquote(parts.fragment)}
            there = target.is_file() and target.is_relative_to(site)
            if not there or (parts.fragment and unquote(parts.fragment) not in anchors):
                dead.append((file.name, address))
    return dead
