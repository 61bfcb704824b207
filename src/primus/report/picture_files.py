"""SVG pictures as PNG files, by a browser: the pictures use CSS variables, which libraries for SVG do not know."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from primus.errors import PrimusError, UnfitError
from primus.process import run_command
from primus.report.page import Html
from primus.runs.files import write_bytes

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
FLAGS = ("--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--hide-scrollbars")  # fmt: skip
"""--no-sandbox: the page is our own, and root cannot start the sandbox in a container."""
SVG_SIZE = re.compile(r'<svg\b[^>]*? width="([\d.]+)" height="([\d.]+)"')
LIMIT_S = 60.0
SCALE = 2
"""Pixels of the file for one of the picture."""


def write_pictures(pictures: Mapping[str, Html], folder: Path) -> list[Path]:
    """Write each picture as NAME.png.

    Raises:
        UnfitError: No browser is installed.
        PrimusError: The browser fails, or a file cannot be written.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UnfitError("PNG files need a browser, and none is installed", "install Chromium, or use --html")
    return [_write_picture(browser, picture, folder / f"{name}.png") for name, picture in pictures.items()]


def _write_picture(browser: str, picture: Html, path: Path) -> Path:
    """Write a picture, or several, one below the other."""
    sizes = [(float(width), float(height)) for width, height in SVG_SIZE.findall(picture)] or [(880.0, 400.0)]
    width, height = round(max(size[0] for size in sizes)), round(sum(size[1] for size in sizes))
    with tempfile.TemporaryDirectory(prefix="primus-picture-") as name:
        html, png = Path(name, "picture.html"), Path(name, "picture.png")
        style = "<style>body { margin: 0; } .chart { margin: 0 !important; display: block; }</style>"
        html.write_text(f"<!doctype html><meta charset=utf-8>{style}{picture}", encoding="utf-8")
        words = [browser, *FLAGS, f"--user-data-dir={name}/profile", f"--force-device-scale-factor={SCALE}",
                 f"--window-size={width},{height}", f"--screenshot={png}", html.as_uri()]  # fmt: skip
        done = run_command(words, limit_s=LIMIT_S)
        if done.state != "ok" or not png.is_file():
            raise PrimusError(f"{path}: the browser drew no picture: {done.problem}", "use --html")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, png.read_bytes())
    return path
