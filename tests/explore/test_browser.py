"""The explorer in a real browser: Debian's Chromium, driven by Playwright."""

import time
from urllib.parse import urlsplit

import pytest
from shoot_explorer import CHROMIUM, chromium, click_picture, press_tile

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
pytest.importorskip("playwright", reason="the browser is driven by Playwright: pip install 'gsanet[dev]'")
LONG = 20_000  # milliseconds, on a machine with other things to do


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser, address):
    """The page once its maps are there. It must ask for nothing elsewhere, and complain of nothing."""
    asked, complaints = [], []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(LONG)
    page.on("request", lambda request: asked.append(request.url))
    page.on("websocket", lambda opened: asked.append(opened.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.locator("#branches .map").first.wait_for()
    yield page
    page.close()
    outside = {url for url in asked if urlsplit(url).hostname != "127.0.0.1" and not url.startswith(("data:", "blob:"))}
    assert asked
    assert outside == set()
    assert complaints == []


def pixel(page):
    return page.locator("#picture p").inner_text().rpartition("pixel ")[2]


def sources(page, part):
    return page.locator(f"#{part} .map img").evaluate_all("images => images.map(image => image.src)")


def wait_for_pixel(page, words):
    page.locator("#picture p", has_text=f"pixel {words}").wait_for()


def test_a_click_changes_the_maps(page):
    assert "3" in page.locator("#prediction").inner_text()
    assert pixel(page) == "3, 3"
    before = {part: sources(page, part) for part in ("branches", "heads", "stages")}
    seconds = []
    for column in (6, 1, 6):
        started = time.perf_counter()
        click_picture(page, (column + 0.5) / 8, 1.5 / 8)
        wait_for_pixel(page, f"{column}, 1")
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1
    for part, images in before.items():
        after = sources(page, part)
        assert len(after) == len(images)
        assert all(one != other for one, other in zip(after, images, strict=True)), part
    # The mark lies over the pixel of the picture, and every image has arrived.
    picture, cross = (page.locator(where).bounding_box() for where in (".photograph", ".cross"))
    assert cross["x"] + cross["width"] / 2 == pytest.approx(picture["x"] + picture["width"] * 6.5 / 8, abs=1)
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")


def test_stages_heads_and_branches_are_chosen(page):
    page.locator("#stage label", has_text="2").click()
    page.get_by_text("Stage 2, block 1, all heads").wait_for()
    page.locator("#head label", has_text="5").click()
    page.get_by_text("Stage 2, block 1, head 5").wait_for()
    press_tile(page, "[data-stage='1'][data-block='1']")
    page.get_by_text("Stage 1, block 1, head 5").wait_for()
    assert page.locator("#stage .selected").inner_text().strip() == "1"
    press_tile(page, "[data-head='0']")
    assert page.locator("#head .selected").inner_text().strip() == "all"
    before = sources(page, "stages")
    press_tile(page, "[data-branch='row']")
    assert sources(page, "stages") != before
    assert "row, all heads" in page.locator("#stages h2").inner_text()


def test_pictures_are_opened(page, uploads):
    page.locator("#samples [data-sample='7']").click()
    page.locator(".photograph img[alt='7']").wait_for()
    for name, ratio in {"tall.png": 20 / 80, "moving.gif": 60 / 40, "clear.png": 60 / 40}.items():
        page.set_input_files("#file input[type=file]", uploads / name)
        page.locator(f".photograph img[alt='{name}']").wait_for()
        box = page.locator(".photograph").bounding_box()
        assert box["width"] / box["height"] == pytest.approx(ratio, rel=0.02)
    click_picture(page, 30.5 / 60, 36.5 / 40)
    wait_for_pixel(page, "30, 36")


def test_bad_pictures_are_refused_and_it_goes_on(page, uploads):
    for name, words in {
        "bad-text.jpg": "bad-text.jpg is not an image of a known kind",
        "bad-huge.png": "more than 100 megapixels are refused",
        "bad-cut.jpg": "bad-cut.jpg cannot be read",
    }.items():
        page.set_input_files("#file input[type=file]", uploads / name)
        page.get_by_text(words).wait_for()
    assert page.locator(".photograph img[alt='3']").is_visible()
    click_picture(page, 0.9, 0.9)
    wait_for_pixel(page, "7, 7")
    page.set_input_files("#file input[type=file]", uploads / "print.jpg")
    page.locator(".photograph img[alt='print.jpg']").wait_for()
    click_picture(page, 0.02, 0.5)  # veiled
    page.get_by_text("Click on the clear part").wait_for()


def test_dark(browser, address):
    page = browser.new_page(color_scheme="dark")
    page.goto(address)
    page.locator("#branches .map").first.wait_for(timeout=LONG)
    ink, paper = (
        sum(map(int, page.evaluate(f"getComputedStyle(document.body).{name}").strip("rgb()").split(", ")))
        for name in ("color", "backgroundColor")
    )
    assert ink > 500 > 200 > paper
    page.close()
