"""Take the picture of the explorer, docs/explorer.png: serve it, open it in Chromium, click, and shoot.

python docs/shoot_explorer.py --run DIR --sample coffee --at 0.5,0.4 --tile "[data-branch=content]"

What is not listed by --help, such as --run or --weights, goes to `gsanet explore`. Needs Chromium (on Debian
`apt-get install chromium`) and Playwright, which is part of `gsanet[dev]`.
"""

import argparse
import io
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTH, HEIGHT = 1280, 900
LARGEST = 400_000  # bytes


@contextmanager
def serving(*arguments: object) -> Iterator[str]:
    """Run `gsanet explore` in a process of its own; gives the address of its page."""
    command = [sys.executable, "-m", "gsanet", "explore", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next((word for line in process.stdout for word in line.split() if word.startswith("http")), None)
        if address is None:
            raise OSError(f"`{' '.join(command)}` ended with {process.wait()}")
        try:
            yield address
        finally:
            process.send_signal(signal.SIGINT)
    if process.returncode:
        raise OSError(f"`{' '.join(command)}` ended with {process.returncode}")


@contextmanager
def chromium() -> Iterator["Browser"]:
    """The system's Chromium without a window; none is downloaded."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In a container one is root, and there Chromium starts only without its sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def click_picture(page: "Page", across: float, down: float) -> None:
    """Click the picture at these shares of its width and height; the answer is not waited for."""
    box = page.locator(".photograph").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + across * box["width"], box["y"] + down * box["height"])


def press_tile(page: "Page", selector: str) -> None:
    """Click a tile and wait until it is the chosen one."""
    page.locator(f"button{selector}").click()
    page.locator(f"button{selector}[aria-pressed=true]").wait_for()


def save_small(shot: bytes, file: Path) -> None:
    """Write a picture with as many levels of each colour as fit into `LARGEST` bytes."""
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    for levels in (256, 128, 64, 32):
        table = [round(round(value * (levels - 1) / 255) * 255 / (levels - 1)) for value in range(256)]
        image.point(table * 3).save(file, optimize=True)
        if file.stat().st_size <= LARGEST:
            return
    raise ValueError(f"{file} has {file.stat().st_size:,} bytes, more than {LARGEST:,}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", help="which picture, by name; default: the first")
    parser.add_argument("--at", default="0.5,0.5", help="where to click, as shares of width and height")
    parser.add_argument("--tile", action="append", default=[], help="what to choose then, such as [data-head='3']")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("explorer.png"))
    chosen, others = parser.parse_known_args(arguments)
    if CHROMIUM is None:
        parser.error("there is no chromium: apt-get install chromium")
    across, down = map(float, chosen.at.split(","))
    with serving(*others) as address, chromium() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address)
        page.locator("#branches .map").first.wait_for()
        if chosen.sample:
            page.locator(f"#samples [data-sample='{chosen.sample}']").click()
            page.locator(f".photograph img[alt='{chosen.sample}']").wait_for()
        click_picture(page, across, down)
        page.wait_for_timeout(2000)  # an answer takes a fraction of this
        for tile in chosen.tile:
            press_tile(page, tile)
        page.mouse.move(WIDTH - 1, 0)  # over nothing that lights up
        save_small(page.screenshot(full_page=True, animations="disabled"), chosen.out)
    print(f"taken: {chosen.out}")


if __name__ == "__main__":
    main()
