"""A real Jupyter server and Debian's Chromium, driven together.

A `Server` runs `jupyter lab` or `jupyter notebook` of one environment in a folder of its
own; a `Front` is one browser page on it. JavaScript reaches the application as
``window.jupyterapp``, which the server exposes on request.
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
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from tests.builders import cell as code_cell
from tests.builders import notebook
from tests.conftest import ORIGINAL_ENVIRONMENT
from tests.waiting import HANGS, PATIENCE, until

__all__ = [
    "CHROMIUM",
    "FLAGS",
    "LOAD",
    "USE",
    "Front",
    "MissingError",
    "Server",
    "chromium",
    "drift",
]

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LOAD = "%load_ext jupyter_detllm"
USE = "%detllm use fake"
PLUGIN = "jupyter-detllm:plugin"
_MILLISECONDS = PATIENCE * 1000
Book = dict[str, Any]


def drift(field: str = "engine.dtype=float32") -> str:
    """Return the lines that start a fake engine whose tokens differ, and so does a field."""
    return f"%detllm release\n%detllm use fake drift_salt=other --drift-field {field}"


class MissingError(Exception):
    """What the browser tests need and this machine lacks: a failure, never a skip."""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """A Jupyter server with its own home, configuration and notebook folder."""

    def __init__(
        self,
        folder: Path,
        app: str = "lab",
        python: str = sys.executable,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        extension: bool = True,
        drive: str = "",
        judge: bool = True,
    ) -> None:
        self.app = app
        self.python = python
        self.root = folder / "root"
        self._folder = folder
        self._options = options
        self._extension = extension
        self._judge = judge
        # Older versions of collaboration open what is shared from a drive of their own.
        self.drive = drive
        self._environment = dict(environment or {})
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._spares = ThreadPoolExecutor(max_workers=1)
        self._spare: Future[str] | None = None

    def __enter__(self) -> Server:
        for name in ("root", "home", "config/labconfig", "data/labextensions", "runtime"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        disabled = {"@jupyterlab/apputils-extension:announcements": True}
        if self._extension:
            # The checkout's bundle, not the copy that an editable install made of it.
            bundle = ROOT / "jupyter_detllm" / "labextension"
            (self._folder / "data/labextensions/jupyter-detllm").symlink_to(bundle)
        else:
            disabled["jupyter-detllm"] = True
        # Kernels run in the environment of the tests, whatever runs the server.
        kernel = self._folder / "data/kernels/python3"
        kernel.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "Python 3 (ipykernel)", "language": "python"}
        (kernel / "kernel.json").write_text(json.dumps(spec))
        # Environments of other JupyterLabs hold no package: the checkout's is enabled by hand.
        modules = {"jupyter_detllm.serverext": self._judge}
        config = {"ServerApp": {"jpserver_extensions": modules}}
        (self._folder / "config/jupyter_server_config.json").write_text(json.dumps(config))
        page = {"disabledExtensions": disabled}
        (self._folder / "config/labconfig/page_config.json").write_text(json.dumps(page))
        with (self._folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self._folder,
                env=self._env(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait()
        return self

    def _command(self) -> list[str]:
        name = "JupyterNotebookApp" if self.app == "notebook" else "LabApp"
        return [
            *(self.python, "-m", f"jupyter{'lab' if self.app == 'lab' else ''}"),
            *(() if self.app == "lab" else (self.app,)),
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--port={self._port}",
            "--ServerApp.port_retries=0",
            "--IdentityProvider.token=",
            "--ServerApp.password=",
            "--ServerApp.disable_check_xsrf=True",
            f"--ServerApp.root_dir={self.root}",
            f"--{name}.expose_app_in_browser=True",
            *self._options,
        ]

    def _env(self) -> dict[str, str]:
        folder = self._folder
        path = f"{Path(self.python).parent}{os.pathsep}{ORIGINAL_ENVIRONMENT.get('PATH', '')}"
        modules = [str(ROOT), *filter(None, [ORIGINAL_ENVIRONMENT.get("PYTHONPATH")])]
        own = {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join(modules),
            "HOME": str(folder / "home"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTER_PREFER_ENV_PATH": "0",
            "IPYTHONDIR": str(folder / "ipython"),
            "HF_HUB_OFFLINE": "1",
        }
        kept = {k: v for k, v in ORIGINAL_ENVIRONMENT.items() if not k.startswith("JUPYTER")}
        return {**kept, **own, **self._environment}

    def _wait(self) -> None:
        deadline = time.monotonic() + HANGS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            with contextlib.suppress(OSError, HTTPException):
                self.get("/api/status")
                return
            time.sleep(0.1)
        self.__exit__()
        raise MissingError(f"the {self.app} server did not start: {self.log()[-2000:]}")

    def log(self) -> str:
        """Return what the server has written so far."""
        return (self._folder / "server.log").read_text(errors="replace")

    def get(self, path: str, method: str = "GET", body: str | None = None) -> bytes:
        """Ask the server."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=HANGS)
        try:
            connection.request(method, path, body)
            return connection.getresponse().read()
        finally:
            connection.close()

    def set_policy(self, policy: str | None) -> None:
        """Set or reset `stampPolicy`; a page that is loaded afterwards follows it."""
        self.set(PLUGIN, {"stampPolicy": policy} if policy else {})

    def set(self, plugin: str, settings: Mapping[str, Any]) -> None:
        """Set what the user may set of a plugin."""
        body = json.dumps({"raw": json.dumps(settings)})
        self.get(f"/lab/api/settings/{plugin}", "PUT", body)

    def spare_kernel(self) -> str:
        """Return the id of a kernel that nobody uses; the next one starts meanwhile."""
        spare = self._spare or self._spares.submit(self._start_kernel)
        found = spare.result()
        self._spare = self._spares.submit(self._start_kernel)
        return found

    def _start_kernel(self) -> str:
        return str(json.loads(self.get("/api/kernels", "POST", '{"name": "python3"}'))["id"])

    def begin_session(self, name: str) -> None:
        """Start the kernel of a notebook while a page still loads; it will be found there."""
        kernel = {"name": "python3"}
        session = {"path": name, "name": name, "type": "notebook", "kernel": kernel}
        self._spares.submit(self.get, "/api/sessions", "POST", json.dumps(session))

    def stop_kernels(self) -> None:
        """Shut down every kernel."""
        self._spare = None
        for kernel in json.loads(self.get("/api/kernels")):
            with contextlib.suppress(OSError):
                self.get(f"/api/kernels/{kernel['id']}", "DELETE")

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._spares.shutdown(cancel_futures=True)
        with contextlib.suppress(OSError):
            self.stop_kernels()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def write(self, name: str, *cells: str | Book, book: Book | None = None) -> Path:
        """Write a notebook of these cells; their ids are ``c0``, ``c1``..."""
        made = book or notebook(*(code_cell(c) if isinstance(c, str) else c for c in cells))
        if book is None:
            # Lab adds what it misses, and a notebook that is dirty on opening is its doing.
            made["metadata"] = {**_METADATA, **made["metadata"], **_METADATA}
            for index, found in enumerate(made["cells"]):
                found["id"] = f"c{index}"
                found.setdefault("execution_count", None)
        for found in made["cells"]:
            if found.get("outputs") == []:
                found["execution_count"] = None
        path = self.root / name
        path.write_text(json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        return path

    def read(self, name: str) -> Book:
        """Return a notebook as it is on the disk; a server that saves writes it in pieces."""
        found: list[Book] = []

        def whole() -> bool:
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads((self.root / name).read_text()))
            return bool(found)

        until(whole, f"{name} to be JSON")
        return found[0]


_METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
        "version": ".".join(map(str, sys.version_info[:3])),
    },
}


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """Start a browser with a fresh profile and return its context."""
    if not CHROMIUM.exists():
        raise MissingError("Chromium is not installed: apt-get install chromium (as root)")
    from playwright.sync_api import sync_playwright

    profile = folder / "profile"
    with sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(profile),
            executable_path=str(CHROMIUM),
            headless=True,
            args=list(FLAGS),
            viewport={"width": 1280, "height": 860},
            env={**ORIGINAL_ENVIRONMENT, "HOME": str(folder)},
        )
        context.set_default_timeout(_MILLISECONDS)
        try:
            yield context
        finally:
            context.close()
            shutil.rmtree(profile, ignore_errors=True)


_CURRENT = "window.jupyterapp.shell.currentWidget"
# As a wait it outlives a page that Lab loads once more for "?reset"; a call would not.
_RESTORED = "() => window.jupyterapp && window.jupyterapp.restored.then(() => true)"
_IDLE = f"""() => {{
  const w = {_CURRENT};
  const k = w && w.context && w.context.sessionContext.session?.kernel;
  return Boolean(k) && k.status === 'idle' && k.connectionStatus === 'connected';
}}"""
_META = f"""() => {{
  const m = {_CURRENT}.context.model;
  return {{
    notebook: m.sharedModel.getMetadata(),
    dirty: m.dirty,
    cells: [...m.cells].map(c => ({{
      id: c.id, type: c.type, metadata: c.metadata, source: c.sharedModel.getSource(),
      outputs: c.type === 'code' ? c.outputs.toJSON() : [],
    }})),
  }};
}}"""
_MODULE = "window._JUPYTERLAB['jupyter-detllm'].get('./extension').then(f => f())"
# Changes are gathered for a quarter of a second; a page without the extension gathers none.
_SETTLED = f"""async () => {{
  const extension = window._JUPYTERLAB['jupyter-detllm'];
  const stampers = extension && (await extension.get('./extension'))().stampers;
  const stamper = stampers && stampers.get({_CURRENT}.context);
  const pause = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));
  await pause(30);
  while (stamper && stamper.busy) await pause(20);
  await new Promise(resolve => requestAnimationFrame(resolve));
}}"""
# The command's end is also that of its checkpoint: until then another Save does nothing.
_WHEN_SAVED = f"""() => {{
  {_CURRENT}.activate();
  const {{ commandExecuted }} = window.jupyterapp.commands;
  window._saved = new Promise((resolve, reject) => {{
    const seen = (_, {{ id, result }}) => {{
      if (id === 'docmanager:save') {{
        commandExecuted.disconnect(seen);
        result.then(() => resolve(true), reject);
      }}
    }};
    commandExecuted.connect(seen);
  }});
}}"""


class Front:
    """One browser page on a server, with one notebook in front."""

    def __init__(self, context: Any, server: Server) -> None:
        self.server = server
        self.page = context.new_page()
        self.logs: list[str] = []
        self.page.on("console", lambda message: self.logs.append(message.text))
        self.page.on("pageerror", lambda error: self.logs.append(f"PAGE ERROR {error}"))
        self._loaded = False

    @property
    def is_lab(self) -> bool:
        return self.server.app == "lab"

    def start_app(self) -> Front:
        """Load the application without a notebook."""
        if not self._loaded:
            # A workspace of its own: resetting the default one loads the page twice.
            self.page.goto(f"{self.server.url}/lab/workspaces/{uuid.uuid4().hex}")
            self.wait("() => window.jupyterapp && window._JUPYTERLAB['jupyter-detllm']")
            self.wait(_RESTORED)
            self._loaded = True
        return self

    def open(self, name: str, *, kernel: bool = True, spare: bool = True) -> Front:
        """Open a notebook; in JupyterLab as a tab of the page that is there.

        A spare kernel is there at once, but its environment does not name the notebook.
        Tests open different names: sessions of the one before may still be ending.
        """
        path = f"{self.server.drive}{name}"
        self.page.bring_to_front()  # a page behind another one is hardly drawn
        if self.is_lab:
            args: dict[str, Any] = {"path": path, "factory": "Notebook"}
            if spare:
                args["kernel"] = {"id": self.server.spare_kernel()}
            self.start_app()
            self.command("docmanager:open", args)
        else:
            self.server.begin_session(name)
            self.page.goto(f"{self.server.url}/notebooks/{name}")
        # Notebook 7 may put an empty untitled element first: wait for the very file.
        self.page.wait_for_function(
            f"name => window.jupyterapp && {_CURRENT}?.context?.path === name", arg=path
        )
        self.page.wait_for_function(f"() => {_CURRENT}.context.isReady")
        self.wait(f"() => Boolean({_CURRENT}.node.querySelector('.jp-Cell')?.offsetParent)")
        if kernel:
            self.idle()
        self.settle()
        return self

    def reopen(self, name: str) -> Front:
        """Close the notebook in front without saving, and open it again from the disk."""
        self.close()
        return self.open(name, spare=False)

    def close(self) -> None:
        """Close the notebook in front, whatever was not saved."""
        if self.is_lab:
            self.evaluate(f"() => {{ const w = {_CURRENT}; w.context.model.dirty = false; }}")
            self.evaluate(f"() => {_CURRENT}.dispose()")
            self.page.wait_for_timeout(100)

    def clear(self) -> None:
        """Close every notebook and dialog, and end the kernels that they had."""
        for _ in range(3):  # a dialog that a failed test left would fail all that follow
            if self.page.locator(".jp-Dialog").count():
                self.page.keyboard.press("Escape")
                self.page.wait_for_timeout(200)
        self.evaluate(
            """async () => {
              const app = window.jupyterapp;
              for (const w of [...app.shell.widgets('main')]) {
                if (w.context) { w.context.model.dirty = false; w.dispose(); }
              }
              void app.serviceManager.sessions.shutdownAll();
            }"""
        )

    def quit(self) -> None:
        """Close the page."""
        self.page.close(run_before_unload=False)

    def evaluate(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def wait(self, script: str, argument: Any = None) -> None:
        """Wait until a function is true in the page."""
        self.page.wait_for_function(script, arg=argument)

    def idle(self) -> None:
        """Wait for a connected kernel that does nothing."""
        self.page.wait_for_function(_IDLE)

    def command(self, name: str, args: Mapping[str, Any] | None = None) -> None:
        """Execute a command and wait for it."""
        self.evaluate(
            "([n, a]) => window.jupyterapp.commands.execute(n, a).then(() => null)",
            [name, dict(args or {})],
        )

    def run_all(self) -> None:
        """Run every cell and wait for the last; then for the extension to have looked."""
        self.command("notebook:run-all-cells")
        self.idle()
        self.settle()

    def run(self, index: int) -> None:
        """Run one cell."""
        self.select(index)
        self.command("notebook:run-cell")
        self.idle()
        self.settle()

    def start(self) -> None:
        """Run every cell without waiting."""
        self.evaluate(
            "() => { window._run = window.jupyterapp.commands.execute('notebook:run-all-cells'); }"
        )

    def select(self, index: int) -> None:
        """Make one cell the active one."""
        self.evaluate(f"i => {{ {_CURRENT}.content.activeCellIndex = i; }}", index)

    def settle(self, milliseconds: int = 0) -> None:
        """Wait until the extension has looked at every change, or for a given time."""
        if milliseconds:
            self.page.wait_for_timeout(milliseconds)
        else:
            self.evaluate(_SETTLED)

    def save(self) -> Book:
        """Save by the keyboard, as a user does; return what is on the disk."""
        self.evaluate(_WHEN_SAVED)
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        self.evaluate("() => window._saved")
        assert not self.model()["dirty"]
        return self.server.read(self.name())

    def name(self) -> str:
        return str(self.evaluate(f"() => {_CURRENT}.context.path"))

    def model(self) -> Any:
        """Return metadata, cells and whether the open model is dirty."""
        return self.evaluate(_META)

    def status(self) -> list[str]:
        """Return the texts of the indicators that can be seen."""
        found: list[str] = self.evaluate(
            "() => [...document.querySelectorAll('.jp-detllm-status')]"
            ".filter(e => e.offsetParent).map(e => e.textContent)"
        )
        return found

    def state(self) -> dict[str, Any]:
        """Return state, text and verdicts as the extension holds them."""
        found: dict[str, Any] = self.evaluate(
            f"""async () => {{
              const m = await {_MODULE};
              const s = m.stampers.get({_CURRENT}.context).status;
              return {{state: s.state, text: s.text, late: s.late, problems: s.problems,
                verdicts: s.cells.map(c => c.verdict)}};
            }}"""
        )
        return found

    def shows(self, text: str) -> None:
        """Wait until the extension says `text`: the other browser's changes take their time."""
        end = time.monotonic() + PATIENCE
        while (state := self.state())["text"] != text:
            assert time.monotonic() < end, f"it says {state['text']!r} and never {text!r}"
            self.page.wait_for_timeout(50)

    def core(self, function: str, argument: Any = None) -> Any:
        """Call ``(core, argument) => ...`` with the extension's pure part."""
        script = f"async argument => ({function})((await {_MODULE}).core, argument)"
        return self.evaluate(script, argument)

    def times(self) -> dict[str, list[float]]:
        """Return the milliseconds that the extension has spent, by kind of work."""
        stamper = f"(await {_MODULE}).stampers.get({_CURRENT}.context)"
        found: dict[str, list[float]] = self.evaluate(f"async () => {stamper}.times")
        return found

    def edit(self, index: int, source: str) -> None:
        """Replace a cell's source."""
        self.evaluate(
            f"([i, text]) => [...{_CURRENT}.context.model.cells][i].sharedModel.setSource(text)",
            [index, source],
        )
        self.settle()

    def open_panel(self) -> Any:
        """Open the extension's panel and return it."""
        self.command("detllm:open-panel")
        panel = self.page.locator("#detllm-panel")
        panel.wait_for()
        return panel
