"""The site in a browser: every page at two widths, no errors, nothing missing, no horizontal scroll bar."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import re
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.helpers.chromium import CHROMIUM, opened
from tests.helpers.paths import ROOT

SITE = ROOT / "build" / "site"
WIDTHS = (1280, 400)
#: Shows the pages one after another in a frame, and posts what is wider than the frame.
HARNESS = """<!doctype html><body><script>
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  const loaded = new Promise(done => { frame.onload = done; });
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const seen = frame.contentDocument, root = seen.documentElement;
  const blank = [...seen.images].filter(one => one.complete && !one.naturalWidth).map(one => one.src);
  const found = {page, width, title: seen.title, over: root.scrollWidth - root.clientWidth, blank};
  frame.remove();
  return found;
}
(async () => {
  const found = [];
  for (const page of PAGES) for (const width of WIDTHS) found.push(await look(page, width));
  await fetch("/result", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class Pages(SimpleHTTPRequestHandler):
    """Serves the site and the harness, and notes what is not there."""

    def __init__(self, *args, noted, harness, **options):
        self.noted, self.harness = noted, harness
        super().__init__(*args, **options)

    def do_GET(self):
        if self.path != "/harness":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.harness.encode())

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.noted.put(json.loads(text))

    def send_error(self, code, message=None, explain=None):
        if self.path != "/favicon.ico":
            self.noted.put(f"{code} {self.path}")
        super().send_error(code, message, explain)

    def log_message(self, *_args):
        pass


@contextlib.contextmanager
def served(site, harness):
    """A server of the site on a free port; yields its address and the queue of what it notes."""
    noted = queue.Queue()
    handler = functools.partial(Pages, directory=str(site), noted=noted, harness=harness)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", noted
        finally:
            server.shutdown()
            thread.join()


def looked_at(site, pages, tmp_path):
    """What a browser says of these pages, what the server missed, and the console."""
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    harness = HARNESS.replace("PAGES", json.dumps(pages), 1).replace("WIDTHS", json.dumps(WIDTHS), 1)
    with served(site, harness) as (address, noted), (tmp_path / "console").open("w+") as console:
        settings = [
            "--headless",
            "--no-sandbox",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        command = [CHROMIUM, *settings, "--remote-debugging-port=0", f"{address}/harness"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=console)
        try:
            missing = []
            while isinstance(one := noted.get(timeout=240), str):
                missing.append(one)
        finally:
            process.terminate()
            process.wait(30)
        console.seek(0)
        return one, missing, re.findall(r"CONSOLE.*", console.read())


@pytest.mark.slow
@pytest.mark.extended
def test_every_page_is_whole_at_two_widths(tmp_path):
    if not SITE.is_dir():
        pytest.skip("the site is not built: make docs")
    pages = sorted(f"/{path.relative_to(SITE).as_posix()}" for path in SITE.rglob("*.html"))
    found, missing, console = looked_at(SITE, [page for page in pages if page != "/404.html"], tmp_path)
    assert {one["width"] for one in found} == set(WIDTHS)
    assert not [one for one in found if one["over"] > 0 or one["blank"] or not one["title"]]
    assert not missing
    assert not console


def test_pages_read_as_files_can_be_searched_and_load_nothing_from_elsewhere():
    """The plugin makes the index a script; without a file of this name all pages load one from unpkg.com."""
    yaml = pytest.importorskip("yaml", reason="the configuration of the site is YAML")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    plugins = [one if isinstance(one, str) else next(iter(one)) for one in config["plugins"]]
    assert plugins.index("search") < plugins.index("offline")
    assert config["use_directory_urls"] is False
    (script,) = config["extra"]["polyfills"]
    assert "iframe-worker" in script
    assert (ROOT / "docs" / script).is_file()


@pytest.mark.slow
@pytest.mark.extended
def test_the_search_box_finds_pages_that_are_read_as_files(tmp_path):
    if not SITE.is_dir():
        pytest.skip("the site is not built: make docs")
    for page in SITE.rglob("*.html"):
        assert not re.search(r"<(script|link)[^>]+(src|href)=.?https?://", page.read_text()), page
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    done = opened(SITE / "index.html", f"--user-data-dir={tmp_path}", query="?q=momentum")
    found = re.search(r"md-search-result__meta[^>]*>(\d+) matching documents", done.stdout)
    assert found is not None
    assert int(found[1]) > 3
    assert "CONSOLE" not in done.stderr


@pytest.mark.slow
@pytest.mark.extended
def test_a_broken_page_is_seen(tmp_path):
    (tmp_path / "bad.html").write_text(
        "<title>bad</title><script>console.error('planted')</script>"
        "<p style='width:800px'>wide</p><img src=nowhere.png><img src=broken.svg>"
    )
    (tmp_path / "broken.svg").write_text("no picture")
    found, missing, console = looked_at(tmp_path, ["/bad.html"], tmp_path)
    assert [one["over"] > 0 for one in found] == [False, True]
    assert all(len(one["blank"]) == 2 for one in found)
    assert set(missing) == {"404 /nowhere.png"}
    assert [line for line in console if "planted" in line]
