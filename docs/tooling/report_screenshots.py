"""Screenshots for the documentation.

    python -m docs.tooling.report_screenshots GRPO_RUN PPO_RUN ONE_RUN OTHER_RUN
    python -m docs.tooling.report_screenshots MIXTURE_RUN

Needs Chromium (Debian: `apt-get install chromium`). Writes docs/images/report-*.png: the live page is that of the PPO
run, the page of several runs compares the last two. MIXTURE_RUN: one of `examples:tiny-mixture`, for
report-environments.png.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.browser import Page, browser_page
from troupe.orchestrator.insight.report.report import write_report
from troupe.orchestrator.insight.watch import WatchServer

IMAGES = Path(__file__).resolve().parents[1] / "images"


async def take(grpo: Path, ppo: Path, compared: Sequence[Path], images: Path) -> None:
    """All screenshots."""
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        first = write_report([grpo], Path(folder) / "grpo.html")
        second = write_report([ppo], Path(folder) / "ppo.html")
        both = write_report(compared, Path(folder) / "both.html")
        async with browser_page(1280, 860) as page:
            await page.open(first.as_uri())
            await _shot(page, images / "report-grpo.png", "#page", 860)
            await _shot(page, images / "report-grpo-curves.png", "#curves", 620)
            await page.run("window.scrollTo(0, 0)")
            await _pick(page, "#sort", "best")
            await _shot(page, images / "report-grpo-samples.png", "#samples", 730)
            await page.open(both.as_uri())
            await _shot(page, images / "report-runs.png", "#page", 860)
            await page.theme("dark")
            await page.open(second.as_uri())
            await _shot(page, images / "report-ppo.png", "#page", 860)
            await _pick(page, "#coloring", "advantage")
            await _shot(page, images / "report-ppo-samples.png", "#samples", 730)
            with WatchServer([ppo], 0) as server:
                threading.Thread(target=server.serve_forever, daemon=True).start()
                await page.theme("light")
                await page.open(server.url)
                for _ in range(80):
                    if await page.run("document.querySelectorAll('#step option').length > 1"):
                        break
                    await page.settle()
                await _shot(page, images / "report-live.png", "#page", 860)
                server.shutdown()
            if page.errors:
                raise RuntimeError(f"the page has errors: {page.errors}")


async def take_evaluation(run: Path, images: Path) -> None:
    """The evaluation of a run."""
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        file = write_report([run], Path(folder) / "run.html")
        async with browser_page(1280, 860) as page:
            await page.open(file.as_uri())
            height = await page.run("document.querySelector('#evaluation').scrollHeight")
            await _shot(page, images / "report-environments.png", "#evaluation", height)
            if page.errors:
                raise RuntimeError(f"the page has errors: {page.errors}")


async def _pick(page: Page, selector: str, value: str) -> None:
    await page.run(
        f"(() => {{ const node = document.querySelector('{selector}'); node.value = '{value}';"
        "node.dispatchEvent(new Event('change')); })()"
    )


async def _shot(page: Page, file: Path, selector: str, height: int) -> None:
    await page.run(f"document.querySelector('{selector}').scrollIntoView()")
    await page.settle()
    if selector == "#page":  # the bar with the sections stands where the page is scrolled to
        await page.run("window.scrollTo(0, 0)")
    await page.settle()
    await page.screenshot(file, selector, height)


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    if len(paths) == 1:
        asyncio.run(take_evaluation(paths[0], IMAGES))
    else:
        asyncio.run(take(paths[0], paths[1], paths[2:], IMAGES))
