"""Pictures of a real sweep in MLflow's pages, for the documentation.

    python scripts/screenshots.py [FOLDER]

runs `precision=fp32,bf16 seed=0,1,2` of the default job in a temporary folder, opens `mlflow ui`
there and writes PNG files to FOLDER, docs/images unless given.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlflow_ui import Page, chromium, quoted, served
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("precision=fp32,bf16", "seed=0,1,2")
SETUPS = ("precision=fp32", "precision=bf16")
COLUMNS = (
    "summary/eval_loss",
    "summary/step_s_median",
    "summary/useful_tokens_per_s",
    "summary/peak_allocated_bytes",
)
WIDTH = 1400
LIMIT_BYTES = 450_000
TIDY = """
const style = document.createElement('style');
style.textContent = '.modebar { display: none !important }';
document.head.append(style);
"""
"""Plotly's tool bars lie over the curves where there is no mouse."""


def main() -> int:
    """Take every picture; the exit code."""
    images = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        launch = Path(folder)
        subprocess.run([sys.executable, "-m", "runner", "-m", *WORDS], cwd=launch, check=True)
        with served(launch) as url, chromium(launch / "profile", width=WIDTH) as driver:
            camera = Camera(Page(driver=driver, url=url), images)
            for take in (camera.grouped, camera.charts, camera.run, camera.compared):
                take()
            (report,) = launch.glob("runs/*/*/report.html")
            camera.report(report)
    return 0


class Camera:
    """Takes one picture after another of the pages of one store."""

    def __init__(self, page: Page, images: Path) -> None:
        self.page = page
        self.images = images

    def shoot(self, name: str, *, height: int, heading: str = "h2") -> None:
        """The picture of what is shown now, at this height. Raises ValueError if it is too big."""
        driver = self.page.driver
        driver.execute_script(TIDY)
        driver.set_window_size(WIDTH, height)
        ActionChains(driver).move_to_element(driver.find_element(By.TAG_NAME, heading)).perform()
        time.sleep(3)  # curves glide to their places
        path = self.images / f"{name}.png"
        driver.save_screenshot(str(path))
        size = path.stat().st_size
        if size > LIMIT_BYTES:
            raise ValueError(f"{path} has {size} bytes; allowed: {LIMIT_BYTES}")
        print(path, size)

    def open(self) -> None:
        """The list of runs, with nothing beside it."""
        self.page.driver.set_window_size(WIDTH, 1000)
        self.page.open_runs()
        self.page.press("//button[@aria-label='Close']")
        self.page.press("//button[@aria-label='Toggle sidebar']")

    def group(self) -> None:
        """Group the list by the tag `setup`."""
        self.page.click("Group by")
        self.page.click("setup")
        self.page.close_menu()
        self.page.see(*(f"Group: {setup}" for setup in SETUPS))

    def columns(self) -> None:
        """Show the figures that setups are judged by, and nothing that they all share."""
        self.page.click("Columns")
        for name in ("Dataset", "Source", "Models", *COLUMNS):
            # The menu comes after the table, whose headers bear the same names.
            self.page.press(f"(//*[text()[normalize-space()={quoted(name)}]])[last()]")
        self.page.close_menu()
        for name in ("Run Name", *COLUMNS):
            self.widen(name)

    def widen(self, column: str) -> None:
        """Make a column wide enough for its name."""
        header = f"//*[@role='columnheader'][@col-id][.//*[normalize-space()={quoted(column)}]]"
        cell = self.page.find(header)
        edge = cell.find_element(By.CSS_SELECTOR, ".ag-header-cell-resize")
        ActionChains(self.page.driver).drag_and_drop_by_offset(edge, 75, 0).perform()

    def grouped(self) -> None:
        """The run list, grouped by setup: one line per setup with the mean over its seeds."""
        self.open()
        self.group()
        self.columns()
        self.shoot("runs-by-setup", height=760)

    def charts(self) -> None:
        """Curves, one per setup: the mean over its seeds, with their spread."""
        self.open()
        self.group()
        address = self.page.driver.current_url
        joint = "&" if "?" in address else "?"
        self.page.driver.get(f"{address}{joint}compareRunsMode=CHART")
        self.page.see("loss/train", "(loss/train)")
        self.shoot("curves-by-setup", height=820)

    def run(self) -> None:
        """Figures and tags of one run."""
        self.open()
        self.group()
        self.page.click(SETUPS[1])
        self.page.see("summary/eval_loss", "Tags")
        self.shoot("run", height=900)

    def compared(self) -> None:
        """One run of each setup side by side, only what differs."""
        self.open()
        self.group()
        for setup in SETUPS:
            self.page.select(setup)
        self.page.click("Compare")
        self.page.see("Comparing 2 Runs", "summary/eval_loss")
        self.page.click("Visualizations")
        for number in (1, 2):
            self.page.press(f"(//button[@role='switch'])[{number}]")
        self.shoot("compare", height=1240)

    def report(self, page: Path) -> None:
        """The comparison's own page, whole."""
        driver = self.page.driver
        driver.get(page.as_uri())
        driver.set_window_size(WIDTH, 1000)
        height = driver.execute_script("return document.documentElement.scrollHeight")
        self.shoot("report", height=height + 140, heading="h1")


if __name__ == "__main__":
    sys.exit(main())
