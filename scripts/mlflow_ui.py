"""A bare `mlflow ui` on a launch folder, and a headless Chromium that looks at it.

Debian's own browser and driver are used, so nothing is downloaded when a page is opened. Pages are
driven by what a person sees: labels, names and links.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

Found = TypeVar("Found")

CHROMIUM = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")
INSTALL = "apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
START_S = 60.0
WAIT_S = 30.0


def free_port() -> int:
    """A port of this host that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a server gives a page."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def served(launch: Path) -> Iterator[str]:
    """Address of an `mlflow ui` that was started in the launch folder without a store's name."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [sys.executable, "-m", "mlflow", "ui", "--port", str(port), "--workers", "1"]
    # The server's executors of background jobs are of no use here and take seconds to start.
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    env.pop("MLFLOW_TRACKING_URI", None)
    with (launch / "ui.log").open("w") as log:
        server = subprocess.Popen(
            words, cwd=launch, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        limit = time.monotonic() + START_S
        while not answers(url):
            if server.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"mlflow ui did not start:\n{(launch / 'ui.log').read_text()}")
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


@contextmanager
def chromium(profile: Path, *, width: int = 1400, height: int = 1000) -> Iterator[WebDriver]:
    """A headless browser with a new, empty profile. Raises FileNotFoundError, with the command
    that installs it, where there is none."""
    for program in (CHROMIUM, DRIVER):
        if not program.exists():
            raise FileNotFoundError(f"{program} is missing; install it: {INSTALL}")
    profile.mkdir(parents=True)
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    size = f"--window-size={width},{height}"
    for flag in (*FLAGS, size, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=str(DRIVER))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def quoted(text: str) -> str:
    """The text as a string of XPath, which knows no escapes."""
    if '"' not in text:
        return f'"{text}"'
    parts = ", '\"', ".join(f'"{part}"' for part in text.split('"'))
    return f"concat({parts})"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a person does with the pages of one `mlflow ui`."""

    driver: WebDriver
    url: str

    def until(self, what: str, ready: Callable[[], Found | None]) -> Found:
        """Wait for a true value of `ready`; AssertionError with the page's text otherwise."""
        problem = ""

        def tried(_: object) -> Found | None:
            nonlocal problem
            try:
                return ready()
            except WebDriverException as error:  # the page is being drawn: look again
                problem = f" ({str(error.msg).splitlines()[0]})"
                return None

        try:
            found = WebDriverWait(self.driver, WAIT_S).until(tried)
        except WebDriverException as error:
            raise AssertionError(f"no {what} on the page{problem}:\n{self.text()}") from error
        assert found is not None
        return found

    def text(self) -> str:
        """All the text that is visible now."""
        return self.driver.find_element(By.TAG_NAME, "body").text

    def see(self, *texts: str) -> str:
        """Wait until all of the texts are visible; the whole text then."""

        def shown() -> str | None:
            page = self.text()
            return page if all(text in page for text in texts) else None

        return self.until(" and ".join(map(repr, texts)), shown)

    def find(self, path: str) -> WebElement:
        """The first visible element of an XPath."""

        def visible() -> WebElement | None:
            elements = self.driver.find_elements(By.XPATH, path)
            return next((element for element in elements if element.is_displayed()), None)

        return self.until(path, visible)

    def press(self, path: str) -> None:
        """Click the first visible element of an XPath, once nothing covers it."""

        def clicked() -> bool:
            self.find(path).click()
            return True

        self.until(f"clickable {path}", clicked)

    def click(self, text: str) -> None:
        """Click what bears exactly this text."""
        self.press(f"//*[text()[normalize-space()={quoted(text)}]]")

    def close_menu(self) -> None:
        """Leave an open menu."""
        self.driver.switch_to.active_element.send_keys(Keys.ESCAPE)

    def open_runs(self, experiment: str = "runner") -> None:
        """As a new visitor, from the front page to the list of an experiment's training runs."""
        self.driver.get(self.url)
        self.driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        self.driver.get("about:blank")
        self.driver.get(self.url)
        self.see("Recent Experiments", experiment)
        self.click("Model training")
        self.press(f"//a[normalize-space()={quoted(experiment)}]")
        self.see("Run Name", "matching run")

    def row(self, name: str) -> str:
        """XPath of the list's row of a run with this name."""
        return f"//*[@role='row'][.//a[normalize-space()={quoted(name)}]]"

    def expand(self, name: str) -> None:
        """Show the jobs of a sweep's parent run."""
        self.press(f"{self.row(name)}//button")

    def select(self, name: str) -> None:
        """Tick a run of the list."""
        # The box itself is invisible; what is drawn is its parent.
        self.press(f"{self.row(name)}//input[contains(@aria-label, 'row selection')]/..")
