"""A real JupyterLab and a real Chromium for the tests marked `browser`: one server and one browser for the whole run.

Everything lives in temporary folders, so that no setting of the user leaks in. Screenshots go to
tests/browser/screenshots for people to look at.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import colibri_lab

HERE = Path(__file__).parent
SCREENSHOTS = HERE / "screenshots"
SOURCE = Path(colibri_lab.__file__).resolve().parent.parent
CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
CHROMIUM += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
WAIT = 60_000  # ms; generous, for machines that do other things too


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Everything in this folder is of the browser suite."""
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless Chromium of the system."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=20_000)
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("the browser suite needs Chromium: install the package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A JupyterLab of our own: its address and the folder it serves."""
    home = tmp_path_factory.mktemp("jupyter")
    root = home / "notebooks"
    root.mkdir()
    names = ["CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"]
    folders = {f"JUPYTER_{name}": home / name.lower() for name in names}
    folders |= {"IPYTHONDIR": home / "ipython", "JUPYTERLAB_SETTINGS_DIR": home / "settings"}
    folders["JUPYTERLAB_WORKSPACES_DIR"] = home / "workspaces"
    quiet = home / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false, "doNotDisturbMode": true}', encoding="utf-8")
    env = {**os.environ, **{name: str(folder) for name, folder in folders.items()}}
    env["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.password="]
    command += [f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True"]
    command += ["--ServerApp.disable_check_xsrf=True"]  # so that the tests may end kernels
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, cwd=root, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_for(address + "/api/status", process, home / "log")
            yield address, root
        finally:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not come up:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}")


class Lab:
    """One notebook open in JupyterLab, with the few things that tests do there."""

    def __init__(self, page: Any, address: str, root: Path) -> None:
        self.page, self.address, self.root = page, address, root
        self.errors: list[str] = []
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: self.errors.append(f"page error: {error}"))
        page.on("console", lambda m: self.errors.append(f"console: {m.text}") if m.type == "error" else None)

    def open(self, name: str, cells: Sequence[str] | None = None) -> None:
        """Opens notebook `name`, made of `cells` when given, and waits until its kernel is idle."""
        if cells is not None:
            (self.root / name).write_text(json.dumps(_notebook(cells)), encoding="utf-8")
        self.page.goto(f"{self.address}/lab/tree/{name}?reset")
        self.page.wait_for_selector(".jp-Notebook")
        self.idle()

    def idle(self) -> None:
        """Waits until the kernel is connected and has nothing to do."""
        self.page.wait_for_function(
            """() => { const kernel = window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel;
                       return kernel && kernel.status === 'idle' && kernel.connectionStatus === 'connected'; }"""
        )

    def run_all(self) -> None:
        """Run → Run All Cells, by the menu."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    def drawn(self) -> Any:
        """Waits until the explorer has drawn itself; its root."""
        self.page.wait_for_function("() => document.querySelector('.clb canvas.top')?.dataset.drawn > 0")
        self.page.wait_for_function("() => !document.querySelector('.clb .body').hidden")
        return self.page.locator(".clb").first

    def python(self, code: str) -> str:
        """Runs `code` in the notebook's kernel and returns what it prints; an exception is raised here."""
        result: Mapping[str, str] = self.page.evaluate(
            """async (code) => {
                 const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                 const future = kernel.requestExecute({code, store_history: false, stop_on_error: false});
                 const got = {out: '', error: ''};
                 future.onIOPub = (message) => {
                   if (message.header.msg_type === 'stream') got.out += message.content.text;
                   if (message.header.msg_type === 'error') got.error = message.content.traceback.join('\\n');
                 };
                 await future.done;
                 return got;
               }""",
            code,
        )
        assert not result["error"], result["error"]
        return result["out"].strip()

    def theme(self, dark: bool) -> None:
        """Switches JupyterLab's theme and waits for it."""
        name = f"JupyterLab {'Dark' if dark else 'Light'}"
        self.page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", name)
        self.page.wait_for_selector(f"body[data-jp-theme-light='{'false' if dark else 'true'}']", state="attached")
        self.page.wait_for_timeout(400)

    def shot(self, name: str, target: Any = None) -> None:
        """A picture of the explorer (or `target`) for people to look at."""
        SCREENSHOTS.mkdir(exist_ok=True)
        (target or self.page.locator(".clb").first).screenshot(path=SCREENSHOTS / f"{name}.png")


def _notebook(cells: Sequence[str]) -> dict[str, Any]:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    code = [
        {
            "cell_type": "code",
            "id": f"cell-{i}",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": source,
        }
        for i, source in enumerate(cells)
    ]
    return {"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture(scope="module")
def lab(chromium: Any, server: tuple[str, Path]) -> Iterator[Lab]:
    """A browser window of its own for each test file; its kernels are shut down afterwards."""
    context = chromium.new_context(viewport={"width": 1600, "height": 1400})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    yield Lab(context.new_page(), *server)
    context.close()
    _shut_down_kernels(server[0])


def _shut_down_kernels(address: str) -> None:
    with urllib.request.urlopen(address + "/api/sessions", timeout=10) as answer:
        sessions = json.load(answer)
    for session in sessions:
        request = urllib.request.Request(f"{address}/api/sessions/{session['id']}", method="DELETE")
        with contextlib.suppress(urllib.error.HTTPError):  # a session that ended by itself
            urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture
def offline(chromium: Any) -> Iterator[Callable[..., Any]]:
    """offline(path, ".diff", "page-diff-nan"): the page of a saved view, opened without a network once it is drawn, and
    a screenshot of that name; afterwards: no request but for the file, and no error.
    """
    context = chromium.new_context(viewport={"width": 1200, "height": 1000}, offline=True)
    page = context.new_page()
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)

    def opened(path: Path, view: str, name: str, dark: bool = False, width: int = 1200) -> Any:
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.set_viewport_size({"width": width, "height": 1000})
        requests.clear()
        page.goto(path.as_uri())
        page.wait_for_function(f"() => Number(document.querySelector('{view}')?.dataset.drawn) > 0")
        page.wait_for_timeout(400)
        SCREENSHOTS.mkdir(exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
        assert requests == [path.as_uri()]
        return page

    yield opened
    context.close()
    assert errors == []
    assert len(requests) <= 1, "the page asked for something"
