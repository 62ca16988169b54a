"""The pages in a real browser: what their DOM shows while requests come."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from servers import Serving, serving

from weft.jobs.serve.models import ServedModel

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def dom(url: str, profile: Path, milliseconds: int) -> str:
    """What a page is after so many milliseconds of the browser's own time."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
        f"--user-data-dir={profile}", f"--virtual-time-budget={milliseconds}", "--dump-dom", url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(page: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>([^<]*)<', page)
    assert found is not None, name
    return found[1]


@needs_chromium
def test_the_page_is_alive(models: dict[str, ServedModel], tmp_path: Path) -> None:
    stop = threading.Event()

    def load(server: Serving) -> None:
        while not stop.is_set():
            server.post("/v1/embeddings", {"input": ["a text", "another one"]})

    with serving(models) as server:
        server.post("/embed", {"inputs": []})
        thread = threading.Thread(target=load, args=(server,))
        thread.start()
        try:
            page = dom(f"{server.url}/", tmp_path, 4000)
        finally:
            stop.set()
            thread.join()
    assert shown(page, "state") == "serving"
    assert shown(page, "models").startswith("unit, plain")
    assert int(shown(page, "requests").replace(",", "")) > 0
    assert shown(page, "failures") == "1"
    for name in ("p50", "p95", "p99"):
        assert float(shown(page, name)) > 0
    assert int(shown(page, "tokens_rate").replace(",", "")) > 0
    assert re.fullmatch(r"\d+ %", shown(page, "fill"))
    points = re.search(r'id="tokens_plot".*?points="([^"]+)"', page, re.S)
    assert points is not None
    assert len(points[1].split()) >= 2


@needs_chromium
def test_the_routes_are_listed(server: Serving, tmp_path: Path) -> None:
    page = dom(f"{server.url}/docs", tmp_path, 2000)
    for path in ("/v1/embeddings", "/rerank", "/v2/rerank", "/embed_sparse"):
        assert f"</b> {path}</summary>" in page
    assert "truncation_direction?" in page


def test_the_pages_load_nothing_from_elsewhere(server: Serving) -> None:
    for path in ("/", "/docs"):
        answer = server.get(path)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", answer.text)
