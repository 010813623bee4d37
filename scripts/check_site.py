"""Check the site as it was built: every link leads somewhere, and in chromium its pages ask for nothing, say nothing on the
console, are no wider than the window, give axe nothing to object to, and can be searched with the keyboard alone.

    python scripts/check_site.py outputs/site    # exit code 1 with the faults, one a line

Links and anchors are those of all HTML files; chromium opens a page of every folder, in three widths, light and dark.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

WIDTHS = (1400, 800, 390)
NEVER = ("http", "https", "mailto", "data")  # where links may lead that are followed by hand
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip


class Links(HTMLParser):
    """Of a page: its anchors, and what it links to or loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.leading: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None and tag != "base":
                self.leading.append(value)


def broken(site: Path) -> Iterator[str]:
    """Links that lead nowhere, as ``page: link``; nothing is loaded from elsewhere."""
    pages = {
        path.resolve(): Links(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    for page, links in pages.items():
        for link in dict.fromkeys(links.leading):
            parts = urlsplit(link)
            if parts.scheme in NEVER:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if page.name == "404.html" and parts.path.startswith("/"):
                target = (site / unquote(parts.path).lstrip("/")).resolve()
            known = pages.get(target)
            if not target.exists() or (
                known is not None and unquote(parts.fragment) not in known.anchors
            ):
                yield f"{page.relative_to(site.resolve())}: {link}"


def loud(site: Path) -> Iterator[str]:
    """What chromium's console says, what pages ask for beyond the site, and which are wider than the window."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        window = webdriver.Chrome(
            options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
        )
        try:
            window.set_script_timeout(120)  # axe, on a busy machine
            window.get("about:blank")
            window.get_log("performance")  # of the browser's own start; reading empties it
            for page in sample(site):
                yield from (f"{page.relative_to(site)}: {fault}" for fault in _faults(window, page))
            yield from _unreachable(window, site / "index.html")
        finally:
            window.quit()


def sample(site: Path) -> list[Path]:
    """The first page, and of every folder that has pages its index or else the largest one."""
    folders: dict[Path, list[Path]] = {}
    for path in site.rglob("*.html"):
        # Of these one is as good as all
        kind = path.parent if path.name != "report.html" else site / "report.html"
        folders.setdefault(kind, []).append(path)
    largest = (max(paths, key=lambda path: path.stat().st_size) for paths in folders.values())
    indices = (path for paths in folders.values() for path in paths if path.name == "index.html")
    return sorted({*largest, *indices})


def _faults(window: Any, page: Path) -> Iterator[str]:
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            window.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                   {"features": [{"name": "prefers-color-scheme", "value": scheme}]})  # fmt: skip
            window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                   {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500})  # fmt: skip
            window.get(page.resolve().as_uri())
            if window.execute_script("return document.documentElement.scrollWidth > innerWidth"):
                yield f"wider than {width}"
            # Tests/tables gives axe a report, and a small one
            if width == WIDTHS[0] and page.name != "report.html":
                yield from (f"{scheme}: {fault}" for fault in _objections(window))
            yield from (
                f"{width}, {scheme}: {entry['message']}" for entry in window.get_log("browser")
            )
            events = (
                json.loads(entry["message"])["message"] for entry in window.get_log("performance")
            )
            sent = (e["params"] for e in events if e["method"] == "Network.requestWillBeSent")
            # the browser's own first tab may still be loading its chrome:// parts
            asked = (
                s["request"]["url"] for s in sent if not s["documentURL"].startswith("chrome://")
            )
            yield from (
                f"asked for {url}"
                for url in asked
                if not url.startswith(("file:", "data:", "about:", "blob:"))
            )


def _objections(window: Any) -> Iterator[str]:
    """What axe objects to."""
    window.execute_script(
        files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    )
    found = window.execute_async_script(
        # Material's navigation is a list of lists, each a landmark of one name
        "axe.run(document, {rules: {'landmark-unique': {enabled: false}}})"
        ".then(arguments[0], error => arguments[0](String(error)))"
    )
    if isinstance(found, str):
        yield f"axe: {found}"
        return
    for rule in found["violations"]:
        yield f"axe: {rule['id']} ({len(rule['nodes'])}): {rule['nodes'][0]['html'][:120]}"


def _unreachable(window: Any, page: Path) -> Iterator[str]:
    """What cannot be had with the keyboard alone: the search, a page that it finds, the text behind the navigation, a table."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    def press(*keys: str) -> None:
        window.switch_to.active_element.send_keys(*keys)

    def reached(condition: Any) -> bool:
        try:
            return bool(WebDriverWait(window, 20).until(condition))
        except TimeoutException:
            return False

    window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    window.get(page.resolve().as_uri())
    press(Keys.TAB)
    if "md-skip" not in window.switch_to.active_element.get_attribute("class").split():
        yield f"{page.name}: the first stop of the tab key is no way past the navigation"
    for _ in range(60):
        press(Keys.TAB)
        if "/results/" in (window.switch_to.active_element.get_attribute("href") or ""):
            break
    at = window.current_url
    press(Keys.ENTER)
    if not reached(lambda w: w.current_url != at):
        yield f"{page.name}: no page of results can be opened with tab and enter"
    window.get(page.resolve().as_uri())
    press("/")
    press("projections")
    if not reached(lambda w: w.find_elements("css selector", ".md-search-result__item")):
        yield f"{page.name}: the search finds nothing"
        return
    at = window.current_url
    press(Keys.ARROW_DOWN)
    press(Keys.ENTER)
    if not reached(lambda w: w.current_url != at):
        yield f"{page.name}: what the search finds cannot be opened"


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/site")
    if not (site / "index.html").is_file():
        print(f"no site in {site}: make site builds it", file=sys.stderr)
        return 1
    faults = list(dict.fromkeys([*broken(site), *loud(site)]))
    print(
        "\n".join(faults)
        or f"{site}: links lead somewhere, the console is silent, nothing is asked for, axe objects to nothing, keys suffice"
    )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
