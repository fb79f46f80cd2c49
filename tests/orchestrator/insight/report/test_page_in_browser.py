"""The report in a real browser: every part is used, nothing is asked of a network, and text stays text."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, Page, browser_page
from troupe.orchestrator.insight.report.report import write_report
from troupe.orchestrator.insight.watch import WatchServer

from .folders import RECORDED, sample, write_evaluations, write_run, write_samples

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

COUNT = "document.querySelectorAll({}).length"
HOSTILE = (
    "<script>window.hit = 1</script>",
    "</script><script>window.hit = 2</script>",
    "<img src=x onerror='window.hit = 3'>",
    "\x1b[31mred\x1b[0m \u202eright to left\u202c \u2028 line",
    "{{ 7 * 7 }} &lt;b&gt; ]]> <!-- ",
    "x" * 1_000_000,
)


CONTRAST = """(() => {
  const linear = (v) => (v <= 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map((v) => linear(Number(v) / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$|transparent|^color/.test(color)) return color;
    }
    return 'rgb(255,255,255)';
  };
  const names = ['.facts', '.healthy', '.banner', '.chip', '.where', '.meta', '.tick', '.card figcaption', '.role',
    'nav a', 'th', '.count'];
  const found = {};
  for (const name of names) {
    const node = document.querySelector(name);
    if (!node) continue;
    const style = getComputedStyle(node);
    const colors = [light(name === '.tick' ? style.fill : style.color), light(back(node))].sort((x, y) => y - x);
    found[name] = (colors[0] + 0.05) / (colors[1] + 0.05);
  }
  return found;
})()"""
"""Contrast of the page's kinds of text with what is behind them."""


async def number(page: Page, selector: str) -> int:
    """Elements that match."""
    return int(await page.run(COUNT.format(json.dumps(selector))))


async def text(page: Page, selector: str) -> str:
    """Text of the first element that matches."""
    return str(await page.run(f"document.querySelector({json.dumps(selector)}).textContent"))


async def choose(page: Page, selector: str, value: str) -> None:
    """Pick a value of a select, or type into a field."""
    await page.run(
        f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.value = {json.dumps(value)};"
        "node.dispatchEvent(new Event('input')); node.dispatchEvent(new Event('change')); })()"
    )
    await page.settle()


async def test_every_part_can_be_used(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", steps=3)
    spec = (second / "spec.yaml").read_text().replace("name: tiny-ppo", "name: other").replace("seed: 7", "seed: 8")
    (second / "spec.yaml").write_text(spec)
    with (second / "events.jsonl").open("a") as events:  # as the transports without digests record it
        events.write('{"time": 1.8e9, "step": 3, "event": "weights", "version": 4, "digest": "", "engines": {}}\n')
    mixed = [sample(3, row, lambda *_: "mixed", 6) | {"source": "code" if row % 3 else "math"} for row in range(16)]
    write_samples(second, 3, mixed)
    write_evaluations(first)
    file = write_report([first, second], tmp_path / "report.html")
    async with browser_page() as page:
        await page.open(file.as_uri())
        sections = await page.run("[...document.querySelectorAll('section')].map(one => one.id)")
        assert sections == [
            "runs",
            "overview",
            "verdicts",
            "evaluation",
            "curves",
            "timeline",
            "samples",
            "ledger",
            "weights",
            "memory",
            "events",
            "spec",
        ]
        assert "tiny-ppo" in await text(page, "h1") and "other" in await text(page, "h1")

        assert (
            await number(page, "#evaluation .intervals") == 2 * 7
        )  # four shares, the cut samples and two levels of each
        row = await text(page, "#evaluation tbody tr:nth-child(2)")
        assert row.startswith("avg@40.125 [0.001, 0.968]0.625 [0.034, 0.988]+0.500")
        assert "<b>form</b>" in await text(page, "#evaluation")
        assert "at most 64 tokens; environment guess; numeric" in await text(page, "#evaluation")

        await page.run("document.querySelector('#curves').scrollIntoView()")
        await page.settle()
        assert await number(page, "[data-metric='reward/mean'] polyline") == 2, "both runs in one chart"
        await choose(page, "#curves input[type=search]", "kl_exact")
        assert await number(page, "#curves .card") == 1
        await choose(page, "#curves input[type=search]", "")

        await page.click("[data-metric='reward/mean'] svg")
        assert await page.run("document.querySelector('#step').value") in {"2", "3"}, "a step leads to its samples"
        row = await text(page, "#samples .row .said")
        assert row.startswith("What is 0 + ") and "The answer" in row, "a sample has the name of its prompt"
        assert "16 samples" in await text(page, "#found")
        await choose(page, "#step", "")
        await choose(page, "#sort", "best")
        best = await text(page, "#samples .row")
        await choose(page, "#sort", "worst")
        assert await text(page, "#samples .row") != best
        await choose(page, "#search", "What is 3 + 1?")
        assert "1 samples" in await text(page, "#found")
        await choose(page, "#search", "no such text")
        assert "No sample matches" in await text(page, "#detail")
        await choose(page, "#search", "")
        await page.click("#samples .row:nth-child(3)")
        assert await number(page, "#samples .row.chosen") == 1 and await number(page, "#detail .sample") == 8
        for coloring in ("advantage", "gap", "entropy", "probability", "value", "version"):
            await choose(page, "#coloring", coloring)
            colors = await page.run(
                "new Set([...document.querySelectorAll('.tokens span')].map(t => t.style.backgroundColor)).size"
            )
            assert colors >= (1 if coloring == "version" else 5), coloring
        assert await page.run("document.querySelector('#source').hidden"), "there is one source"
        await choose(page, "#run", "1")
        assert "48 samples" in await text(page, "#found")
        assert not await page.run("document.querySelector('#source').hidden")
        await choose(page, "#source", "math")
        assert "6 samples" in await text(page, "#found")
        await choose(page, "#source", "")
        assert "48 samples" in await text(page, "#found")

        commands = (await text(page, "#timeline pre")).splitlines()
        assert commands == [f"troupe trace {run} -o trace.json" for run in (first, second)]
        assert "seed" in await text(page, "#runs") and "spec.yaml" in await text(page, "#spec")
        assert "run started" in await text(page, "#events") and "2 samples dropped: no number" in await text(
            page, "#events"
        )
        assert not await page.run("document.querySelector('#weights details').open"), "digests are folded"
        counts = await page.run("[...document.querySelectorAll('#weights .count')].map(one => one.textContent)")
        assert counts == ["4, all verified", "1 without digest"]
        await page.theme("dark")
        await page.screenshot(tmp_path / "dark.png")
        assert (tmp_path / "dark.png").stat().st_size > 20_000
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith("data:")] == [file.as_uri()]


TICKS = """[...document.querySelectorAll('.chart svg')].map(one =>
  [...one.querySelectorAll('text.tick[text-anchor=ANCHOR]')].map(tick => tick.textContent))"""
"""Texts of the ticks of every chart that is drawn; `end` are those of the vertical axis."""
OUTSIDE = """[...document.querySelectorAll('#page *')].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1) && !one.closest('.scroll, pre, nav');
}).map(one => `${one.tagName} ${one.className} ${one.textContent.slice(0, 30)}`)"""
"""What stands outside the window, but for what can be scrolled."""
CUT = """[...document.querySelectorAll('#page *')].filter(one => {
  const style = getComputedStyle(one), own = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  const cuts = style.overflowX === 'hidden' || style.overflowX === 'clip';
  return own && cuts && style.textOverflow !== 'ellipsis' && one.scrollWidth > one.clientWidth + 1;
}).map(one => `${one.tagName} ${one.className} ${one.textContent.slice(0, 30)}`)"""
"""Texts that their own box cuts."""
BESIDE = """[...document.querySelectorAll('.card figcaption *, .legend *, #runs td, .verdict *')].filter(one => {
  const box = one.getBoundingClientRect(), card = one.closest('.card, .scroll, .verdict, section');
  return box.width > 0 && !one.closest('.scroll') && box.right > card.getBoundingClientRect().right + 1;
}).map(one => `${one.tagName} ${one.className} ${one.textContent.slice(0, 30)}`)"""
"""Parts of a card that stand outside of it."""
OVERVIEW = '[data-overview="reward/mean"] '


async def test_curves_have_other_axes_a_logarithmic_scale_and_smoothing(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first" / "run", tokens=0)
    second = write_run(tmp_path / "second" / "run", steps=3, tokens=0)
    for folder in (first, second):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [line | {"policy/importance_weight": 1 + 1e-7 * line["step"]} for line in lines]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    file = write_report([first, second], tmp_path / "report.html")

    async def places(anchor: str) -> list[str]:
        return await page.run(TICKS.replace("ANCHOR", anchor).replace(".chart svg", f"{OVERVIEW}.chart svg") + "[0]")

    async with browser_page(1280, 860) as page:
        await page.open(file.as_uri())
        await page.settle()
        assert await text(page, "#overview .legend") == "first/runsecond/run", "runs of the same name are told apart"
        assert await page.run(f"document.querySelector({json.dumps(OVERVIEW)}).getBoundingClientRect().bottom") < 860
        assert await places("middle") == ["1", "2", "3", "4"]
        await choose(page, "#overview .x-axis", "tokens")
        tokens = await places("middle")
        assert len(set(tokens)) == len(tokens) > 1 and tokens[-1].endswith("k")
        assert await page.run("document.querySelector('#curves .x-axis').value") == "tokens", "one setting for all"
        await choose(page, "#curves .x-axis", "seconds")
        assert all(one.endswith(" s") for one in await places("middle"))

        plain = await page.run(f"document.querySelector({json.dumps(OVERVIEW + 'polyline')}).getAttribute('points')")
        await page.click("#overview .log")
        await page.settle()
        scaled = await page.run(f"document.querySelector({json.dumps(OVERVIEW + 'polyline')}).getAttribute('points')")
        assert scaled != plain and len(scaled.split()) == len(plain.split())
        assert await number(page, f"{OVERVIEW}.raw") == 0
        await choose(page, "#overview .smooth", "0.9")
        assert await number(page, f"{OVERVIEW}.raw") == 2, "the values remain behind the smooth lines"

        await page.run("document.querySelectorAll('#curves details').forEach(one => { one.open = true; })")
        for part in range(0, int(await page.run("document.documentElement.scrollHeight")), 800):
            await page.run(f"window.scrollTo(0, {part})")
            await page.settle()
        charts = await page.run(TICKS.replace("ANCHOR", "end"))
        assert len(charts) > 30 and all(len(set(ticks)) == len(ticks) for ticks in charts), "no label stands twice"
        assert page.errors == []


async def test_nothing_is_cut_off_on_a_phone(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "first", tokens=0), write_run(tmp_path / "second", steps=3, tokens=0)
    write_evaluations(first)
    file = write_report([first, second], tmp_path / "report.html")
    async with browser_page(390, 844) as page:
        await page.open(file.as_uri())
        await page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        await page.settle()
        assert await page.run("document.documentElement.scrollWidth") <= 390
        assert await page.run(OUTSIDE) == []
        cells = "[...document.querySelectorAll('.evaluation td:not(:empty)')]"
        assert await page.run(f"{cells}.filter(one => one.getBoundingClientRect().right > innerWidth).length") == 0
        assert "change" in await page.run(f"{cells}.map(one => getComputedStyle(one, '::before').content).join()")


@pytest.mark.parametrize("width", [390, 1300])
async def test_nothing_of_six_runs_is_cut_off(tmp_path: Path, width: int) -> None:
    """Heads of curves, legends and tables have a value of each run."""
    names = ["baseline", "learning-rate-3e-6", "kl-0.001", "group-size-16", "staleness-2-two-engines", "seed-8"]
    runs = [write_run(tmp_path / name, steps=3 + seed % 2, tokens=0) for seed, name in enumerate(names)]
    for seed, run in enumerate(runs):
        spec = run / "spec.yaml"
        spec.write_text(spec.read_text().replace("seed: 7", f"seed: {seed}").replace("tiny-ppo", run.name))
    write_evaluations(runs[0])
    file = write_report(runs, tmp_path / "report.html")
    async with browser_page(width, 844) as page:
        await page.open(file.as_uri())
        await page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        for part in range(0, int(await page.run("document.documentElement.scrollHeight")), 4000):
            await page.run(f"window.scrollTo(0, {part})")
            await page.settle()
        assert await number(page, ".chart svg") > 20
        assert await page.run("document.documentElement.scrollWidth") <= width
        assert await page.run(OUTSIDE) == []
        assert await page.run(CUT) == []
        assert await page.run(BESIDE) == []
        assert page.errors == []


async def test_text_of_a_model_stays_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, rows=8)
    spec = (run / "spec.yaml").read_text().replace(".cache/models/tiny-llama", "no/tokenizer")
    (run / "spec.yaml").write_text(spec)  # responses are then shown as text, not as the tokens of their ids
    rows = [sample(2, row, lambda _, row: HOSTILE[row % len(HOSTILE)], 6) for row in range(len(HOSTILE))]
    for row, hostile in zip(rows, HOSTILE, strict=True):
        row["messages"] = json.dumps([{"role": hostile[:60], "content": hostile}])
        row["status"] = hostile[:200]
        row["components"] = [{"name": hostile[:40], "value": 1.0}]
        row["prompt_uid"] = hostile[:50]
    write_samples(run, 2, rows)
    file = write_report([run], tmp_path / "report.html")
    assert file.stat().st_size < 2_000_000, "long texts are cut"
    async with browser_page() as page:
        await page.open(file.as_uri())
        await choose(page, "#step", "2")
        shown = ""
        for row in range(len(HOSTILE)):
            await page.click(f"#samples .row:nth-child({row + 1})")
            shown += await page.run("document.querySelector('#samples').textContent")
        assert "<script>window.hit = 1</script>" in shown and "</script><script>" in shown and "<img src=x" in shown
        assert "␛[31mred" in shown and "⟨U+202E⟩" in shown and "{{ 7 * 7 }}" in shown and "more characters" in shown
        assert await page.run("typeof window.hit") == "undefined"
        assert await number(page, "script") == 2 and await number(page, "img") == 0
        assert page.errors == []


async def test_of_ten_thousand_samples_only_those_in_view_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=8, rows=1250, tokens=60)
    file = write_report([run], tmp_path / "report.html")
    async with browser_page() as page:
        await page.open(file.as_uri())
        assert "10,000 samples" in await text(page, "#found")
        assert await number(page, "#samples .row") < 60
        await page.run("document.querySelector('#samples .list').scrollTop = 46 * 9_990")
        await page.settle()
        assert "8 · 1" in await page.run("[...document.querySelectorAll('#samples .row')].at(-1).textContent")
        assert page.errors == []


async def test_a_step_that_is_cut_says_so(tmp_path: Path) -> None:
    file = write_report([write_run(tmp_path / "run", tokens=0)], tmp_path / "report.html", 2_000)
    async with browser_page() as page:
        await page.open(file.as_uri())
        assert "the first 8 of 16 samples of step 4" in await text(page, "#samples")
        assert "8 samples" in await text(page, "#found")


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_text_has_contrast_in_both_themes(tmp_path: Path, theme: str) -> None:
    """At least 4.5 to 1, as WCAG 2.1 asks of small text."""
    file = write_report([write_run(tmp_path / "run")], tmp_path / "report.html")
    async with browser_page() as page:
        await page.theme(theme)
        await page.open(file.as_uri())
        await page.settle()
        found = await page.run(CONTRAST)
        assert len(found) > 8
        assert {name: round(ratio, 2) for name, ratio in found.items() if ratio < 4.5} == {}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[WatchServer, Path]]:
    """A server of a run with three of four steps."""
    run = write_run(tmp_path / "run", steps=3)
    with WatchServer([run], 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield serving, run
        serving.shutdown()


async def test_a_live_page_follows_the_run(server: tuple[WatchServer, Path]) -> None:
    serving, run = server
    async with browser_page() as page:
        await page.open(serving.url)
        assert "step 3 of 8" in await text(page, "#facts")
        for _ in range(40):
            if await number(page, "#step option") >= 2:
                break
            await page.settle()
        await page.run("window.old = new WeakRef(document.querySelector('#curves .chart')); 0")
        line = (RECORDED / "healthy-ppo.jsonl").read_text().splitlines()[3]
        write_samples(run, 4, [sample(4, row, lambda step, row: f"new text {row}", 5) for row in range(8)])
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
        for _ in range(60):
            if "step 4 of 8" in await text(page, "#facts"):
                break
            await page.settle()
        assert "step 4 of 8" in await text(page, "#facts")
        await page.call("HeapProfiler.collectGarbage")
        assert await page.run("window.old.deref() === undefined"), "charts of the page before are let go of"
        await choose(page, "#step", "4")
        assert "new text" in await text(page, "#samples")
        await page.run("window.scrollTo(0, 0)")
        await page.settle()
        await page.click(f"{OVERVIEW}svg")
        assert page.errors == []
        assert {url.split("/")[2] for url in page.requests} == {serving.url.split("/")[2]}


async def test_a_live_page_has_step_0_and_nothing_of_an_abandoned_attempt(server: tuple[WatchServer, Path]) -> None:
    serving, run = server
    lines = [json.loads(line) for line in (RECORDED / "healthy-ppo.jsonl").read_text().splitlines()[:4]]

    def write(first: float, *found: dict[str, object]) -> None:
        again = [line | {"time": first + at} for at, line in enumerate(found)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in again))

    async def until(shown: str) -> None:
        for _ in range(60):
            if shown in await text(page, "#facts"):
                return
            await page.settle()
        raise AssertionError(f"{shown!r} is not in {await text(page, '#facts')!r}")

    (run / "metrics.jsonl").write_text("")
    async with browser_page() as page:
        await page.open(serving.url)
        assert "step 0 of 8" in await text(page, "#facts")
        await page.run("new Promise(done => setTimeout(() => done(1), 2500))")
        write(1.8e9, {"step": 0, "only/at_start": 0.25}, *lines[:3])
        await until("step 3 of 8")
        assert "only/at_start" in await text(page, "#curves")
        await choose(page, "#step", "3")

        (run / "trajectories" / "step-000003.parquet").unlink()  # as a run that resumes before it
        write_samples(run, 4, [sample(4, row, lambda step, row: f"new text {row}", 5) for row in range(8)])
        write(1.9e9, lines[0] | {"reward/mean": 0.125}, *lines[1:])
        await until("step 4 of 8")
        assert "reward 0.125" in await text(page, "#facts"), "the first step too is that of the new attempt"
        steps = await page.run("[...document.querySelectorAll('#step option')].map(one => one.value)")
        assert steps == ["", "4"], "samples of the old attempt are gone"
        assert page.errors == []
