"""The page in a real browser: Debian's Chromium, without a window, driven by selenium."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
import torch

from metaphrase.inspection.attend import Attention, attend
from metaphrase.inspection.explain import explain
from metaphrase.inspection.maps import AttentionMaps
from metaphrase.inspection.page import notebook_frame, write_page
from metaphrase.inspection.words import Piece, Pieces, read_pieces

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="Chromium is not installed (apt-get install chromium chromium-driver)"
)

SOURCE = "The animal didn't cross the street because it was too tired ."
TARGET = "Das Tier überquerte die Straße nicht , weil es zu müde war ."
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(service=webdriver.ChromeService(DRIVER), options=options)
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(autouse=True)
def no_console_error(request):
    yield
    if "browser" in request.fixturenames:
        log = request.getfixturevalue("browser").get_log("browser")
        assert [entry for entry in log if entry["level"] != "INFO"] == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory, ours, word_tokenizer) -> dict[str, tuple[Path, object]]:
    folder = tmp_path_factory.mktemp("pages")
    told = explain(ours, word_tokenizer, SOURCE, "it", 0, 1, target=TARGET)
    plain = attend(ours, word_tokenizer, SOURCE, target=TARGET)
    return {
        "plain": (write_page(plain, folder / "plain.html"), plain),
        "explained": (
            write_page(told.attention, folder / "told.html", explanation=told, kind="encoder", layer=0),
            told,
        ),
    }


def open_page(browser, path: Path, more: str = "") -> None:
    browser.get("about:blank")
    browser.get(path.as_uri() + more)
    wait_for(lambda: browser.execute_script("return document.documentElement.dataset.ready") == "true")


def wait_for(condition, seconds: float = 20):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "the page did not come to the awaited state"
        time.sleep(0.02)
    return value


def pick(browser, group: str, value: str) -> None:
    browser.find_element(By.CSS_SELECTOR, f"#{group} input[value='{value}']").click()


def drawn(browser, expression: str):
    """The value of an expression after the next frame has been drawn."""
    script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done({})));"
    return browser.execute_async_script(script.format(expression))


def readout(browser) -> list[tuple[str, str]]:
    items = "[...document.querySelectorAll('#readout-list li')]"
    return [tuple(row) for row in drawn(browser, f"{items}.map(li => [0, 2].map(i => li.children[i].textContent))")]


def test_picking_a_layer_and_a_head_shows_the_models_weights(browser, pages):
    path, attention = pages["plain"]
    open_page(browser, path)
    for kind, layer, head in (("encoder", 0, 1), ("decoder", 1, 0), ("cross", 1, 1), ("cross", 0, -1)):
        pick(browser, "pick-kind", kind)
        pick(browser, "pick-layer", str(layer))
        pick(browser, "pick-head", str(head))
        browser.execute_script("metaphrase.choose({pin: {side: 'row', index: 4}})")
        row = attention.weights(kind)[layer]
        row = (row.mean(0) if head < 0 else row[head])[4]
        labels = [label.strip() for label in attention.labels(kind)[1]]
        best = sorted(zip(labels, row.tolist(), strict=True), key=lambda pair: -pair[1])[0]
        shown = readout(browser)
        assert shown[0][0] == best[0]
        assert float(shown[0][1].rstrip(" %")) == pytest.approx(100 * best[1], abs=0.51)
        values = drawn(
            browser,
            f"[...metaphrase.matrixOf('{kind}', {layer}, {head}, 'token').values]",
        )
        weights = attention.weights(kind)[layer]
        wanted = (weights.mean(0) if head < 0 else weights[head]).flatten().tolist()
        assert values == pytest.approx(wanted, abs=1e-5)


def test_hovering_and_holding_a_word(browser, pages):
    open_page(browser, pages["plain"][0])
    rows = browser.find_elements(By.CSS_SELECTOR, "#rows .token")
    webdriver.ActionChains(browser).move_to_element(rows[3]).perform()
    assert drawn(browser, "metaphrase.state.hover") == {"side": "row", "index": 3}
    assert "Writing" in browser.find_element(By.ID, "readout-lead").text
    rows[3].click()
    assert rows[3].get_attribute("aria-pressed") == "true"
    webdriver.ActionChains(browser).move_to_element(browser.find_element(By.ID, "help-title")).perform()
    assert drawn(browser, "metaphrase.state.pin") == {"side": "row", "index": 3}
    assert "row=3" in browser.current_url
    open_page(browser, pages["plain"][0], "#view=encoder&layer=1&head=2&units=token&col=5")
    chosen = drawn(browser, "metaphrase.state")
    assert (chosen["kind"], chosen["layer"], chosen["head"], chosen["unit"]) == ("encoder", 0, 1, "token")
    assert chosen["pin"] == {"side": "col", "index": 5}
    assert "is attended to by" in browser.find_element(By.ID, "readout-lead").text


def test_the_keyboard_alone(browser, pages):
    open_page(browser, pages["plain"][0])
    first = browser.find_element(By.CSS_SELECTOR, "#rows .token")
    browser.execute_script("document.querySelector('#pick-unit input:checked').focus()")
    keys = webdriver.ActionChains(browser)
    keys.send_keys(Keys.TAB).perform()
    assert browser.switch_to.active_element == first
    press = lambda *what: webdriver.ActionChains(browser).send_keys(*what).perform()  # noqa: E731
    press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert drawn(browser, "metaphrase.state.hover") == {"side": "row", "index": 2}
    press(Keys.ARROW_RIGHT)
    assert drawn(browser, "metaphrase.state.head") == 0
    press(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert drawn(browser, "metaphrase.state.head") == 1
    press(Keys.PAGE_UP)
    assert drawn(browser, "metaphrase.state.layer") == 0
    press(Keys.ENTER)
    assert drawn(browser, "metaphrase.state.pin") == {"side": "row", "index": 2}
    press(Keys.END)
    assert drawn(browser, "metaphrase.state.hover.index") == 13
    press(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("data-side") == "col"
    press(Keys.ESCAPE)
    assert drawn(browser, "metaphrase.state.pin") is None
    browser.find_element(By.CSS_SELECTOR, "#table-details summary").send_keys(Keys.ENTER)
    wait_for(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#table-frame tbody tr")) == 14)


def test_a_thumbnail_picks_its_head(browser, pages):
    open_page(browser, pages["plain"][0])
    thumbs = browser.find_elements(By.CSS_SELECTOR, ".thumb")
    assert len(thumbs) == 4
    thumbs[1].click()
    assert drawn(browser, "[metaphrase.state.layer, metaphrase.state.head]") == [0, 1]
    assert thumbs[1].get_attribute("aria-pressed") == "true"


def test_explained_numbers_equal_the_models(browser, pages):
    path, told = pages["explained"]
    open_page(browser, path)
    assert float(browser.find_element(By.ID, "explain").get_attribute("data-difference")) < 1e-5
    for name in ("q", "k", "v", "scores", "scaled", "weights", "z", "out"):
        made = drawn(
            browser,
            f"(() => {{ const e = metaphrase.explanation, [r, c] = e.shape('{name}');"
            f" return Array.from({{length: r * c}}, (_, i) => e.again('{name}', Math.floor(i / c), i % c)); }})()",
        )
        assert made == pytest.approx(told.arrays[name].flatten().tolist(), abs=1e-5)
    shown = drawn(
        browser, "[...document.querySelectorAll('.mine .n[data-name=weights]')].map(n => Number(n.dataset.value))"
    )
    assert shown == pytest.approx(told.arrays["weights"][0].tolist(), abs=1e-5)


def test_a_number_leads_to_what_made_it(browser, pages):
    open_page(browser, pages["explained"][0])
    script = "document.querySelectorAll('.mine .n[data-name=weights]')[2].click()"
    browser.execute_script(script)
    trace = browser.find_element(By.ID, "trace")
    assert "didn't" in trace.text and "exp" in trace.text
    trace.find_element(By.CSS_SELECTOR, ".factor").click()  # the scaled score
    trace.find_element(By.CSS_SELECTOR, ".factor").click()  # the score
    assert "q · k" in trace.text
    trace.find_element(By.CSS_SELECTOR, ".factor").click()  # a number of q
    assert "x WQ" in trace.text
    factors = trace.find_elements(By.CSS_SELECTOR, ".factor")
    factors[0].click()  # a number of x
    assert "x = e + p" in trace.text
    trace.find_element(By.XPATH, ".//button[text()='Back']").click()
    assert "x WQ" in trace.text
    assert browser.find_elements(By.CSS_SELECTOR, ".n.is") and browser.find_elements(By.CSS_SELECTOR, ".n.from")


def toy(browser, name: str) -> list[float]:
    return drawn(
        browser,
        f"[...document.querySelectorAll('.toy .n[data-name={name}]')]"
        ".map(n => Number(n.textContent.replace('−', '-')))",
    )


def test_the_worked_example_is_computed_live(browser, pages):
    open_page(browser, pages["explained"][0])
    assert toy(browser, "q") == [1, 2, 1, 1]
    assert toy(browser, "k") == [1, 0, 0, 1]
    assert toy(browser, "scaled") == [0.71, 1.41, 0.71, 0.71]
    assert toy(browser, "weights") == [0.33, 0.67, 0.5, 0.5]
    field = browser.find_element(By.CSS_SELECTOR, ".n-input[data-key=Wq][data-row='0'][data-col='0']")
    field.clear()
    field.send_keys("3")
    assert toy(browser, "q") == [3, 2, 3, 1]
    assert toy(browser, "scaled") == [2.12, 1.41, 2.12, 0.71]
    browser.find_element(By.XPATH, "//button[text()='Reset']").click()
    assert toy(browser, "q") == [1, 2, 1, 1]


def test_markup_rtl_and_emoji_are_text(browser, tmp_path, ours, byte_tokenizer):
    text = "<script>window.hit=1</script> </script> שלום 👩‍👩‍👧 &amp; <b>"
    pieces = read_pieces(byte_tokenizer, byte_tokenizer(text)["input_ids"])
    size = len(pieces)
    weights = torch.full((1, 2, size, size), 1 / size)
    attention = Attention(
        "x<y>&", pieces, pieces, pieces, AttentionMaps(pieces.ids, pieces.ids, pieces.ids, *[weights] * 3)
    )
    open_page(browser, write_page(attention, tmp_path / "markup.html"))
    assert drawn(browser, "window.hit ?? null") is None
    words = drawn(browser, "[...document.querySelectorAll('#cols .token bdi')].map(n => n.textContent)")
    assert words == [*text.split(), "</s>"]
    assert drawn(browser, "document.getElementById('source-text').textContent") == text
    assert drawn(browser, "document.getElementById('model-name').textContent") == "x<y>&"
    assert drawn(browser, "getComputedStyle(document.querySelectorAll('#cols .token bdi')[2]).direction") == "rtl"
    pick(browser, "pick-unit", "token")
    assert drawn(browser, "document.querySelectorAll('#cols .token').length") == size


def test_word_view_merges_as_python_does(browser, tmp_path, byte_tokenizer):
    from metaphrase.inspection.words import merge_words

    pieces = read_pieces(byte_tokenizer, byte_tokenizer("naïve café 😀")["input_ids"])
    size = len(pieces)
    weights = torch.randn(3, 1, 1, size, size, generator=torch.Generator().manual_seed(1)).softmax(-1)
    attention = Attention("m", pieces, pieces, pieces, AttentionMaps(pieces.ids, pieces.ids, pieces.ids, *weights))
    open_page(browser, write_page(attention, tmp_path / "words.html"))
    groups = pieces.units()[1]
    wanted = merge_words(weights[2, 0, 0], groups, groups).flatten().tolist()
    assert drawn(browser, "[...metaphrase.matrixOf('cross', 0, 0, 'word').values]") == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_light_and_dark(browser, pages, theme):
    open_page(browser, pages["explained"][0])
    pick(browser, "pick-theme", theme)
    paper = drawn(browser, "getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 380) == (theme == "light")
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    pick(browser, "pick-theme", "auto")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        assert drawn(browser, "getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 22)"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_phone_scrolls_in_one_direction_only(browser, pages):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(browser, pages["explained"][0])
        assert drawn(browser, "document.documentElement.scrollWidth") <= 360
        assert drawn(browser, "parseFloat(getComputedStyle(document.querySelector('.token')).fontSize)") >= 14
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_inside_a_notebooks_frame(browser, tmp_path, pages):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>n</title><body>{notebook_frame(pages['plain'][1])}", encoding="utf-8")
    browser.get(path.as_uri())
    browser.switch_to.frame(0)
    try:
        wait_for(lambda: browser.execute_script("return document.documentElement.dataset.ready") == "true")
        browser.find_elements(By.CSS_SELECTOR, "#rows .token")[1].click()
        assert browser.find_elements(By.CSS_SELECTOR, "#rows .token.on")
    finally:
        browser.switch_to.default_content()


def axe_source(folder: Path) -> str:
    """axe-core, the accessibility checker: named by METAPHRASE_AXE, or fetched from npm for this test run only."""
    if named := os.environ.get("METAPHRASE_AXE"):
        return Path(named).read_text(encoding="utf-8")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("axe-core cannot be had: npm is not installed, and METAPHRASE_AXE names no axe.min.js")
    try:
        command = [npm, "pack", "--silent", "axe-core@4.14.1"]
        packed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("axe-core cannot be had: npm does not answer")
    if packed.returncode:
        pytest.skip(f"axe-core cannot be had: {packed.stderr.strip()[-200:]}")
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


def test_axe_finds_nothing_serious(browser, pages, tmp_path):
    source = axe_source(tmp_path)
    run = "const done = arguments[0]; axe.run().then(result => done(JSON.stringify(result.violations)))"
    for theme in ("light", "dark"):
        open_page(browser, pages["explained"][0])
        pick(browser, "pick-theme", theme)
        browser.execute_script(
            "document.querySelector('#table-details').open = true; metaphrase.choose({pin: {side: 'row', index: 3}})"
        )
        browser.execute_script("document.querySelector('.mine .n[data-name=z]').click()")
        drawn(browser, "0")
        browser.execute_script(source)
        found = json.loads(browser.execute_async_script(run))
        told = [(one["id"], one["impact"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found]
        assert [one for one in told if one[1] in ("serious", "critical")] == []
        assert len(told) <= 1, told


def processor_seconds(browser) -> float:
    """What the page's main thread has worked. Counted so, other work on the machine does not count."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def test_two_hundred_tokens_stay_usable(browser, tmp_path):
    """6 layers of 16 heads: drawn within 2 seconds, a hover within 100 milliseconds."""
    size, words = 200, [f"word{i}" for i in range(199)]
    body = (Piece(9, f" {word}", False, i) for i, word in enumerate(words))
    pieces = Pieces((*body, Piece(2, "</s>", True, None)), " ".join(words))
    weights = (torch.randn(6, 16, size, size, generator=torch.Generator().manual_seed(2)) * 3).softmax(-1)
    maps = AttentionMaps(pieces.ids, pieces.ids, pieces.ids, *[weights] * 3)
    path = write_page(Attention("large", pieces, pieces, pieces, maps), tmp_path / "large.html")
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    try:
        open_page(browser, path)
        assert processor_seconds(browser) < 2
        thumbs = "document.querySelectorAll('.thumb canvas').length"
        wait_for(lambda: browser.execute_script(f"return {thumbs}") == 6 * 16, 60)
        hover = """const done = arguments[0]; let i = 0; const buttons = document.querySelectorAll('#rows .token');
            const step = () => { if (i === 10) return done(i);
              buttons[9 * i++].dispatchEvent(new PointerEvent('pointerover', {bubbles: true, pointerType: 'mouse'}));
              requestAnimationFrame(() => requestAnimationFrame(step)); }; step();"""
        before = processor_seconds(browser)
        assert browser.execute_async_script(hover) == 10
        assert (processor_seconds(browser) - before) / 10 < 0.1
        assert browser.execute_script("return metaphrase.state.hover.index") == 81
    finally:
        browser.execute_cdp_cmd("Performance.disable", {})
