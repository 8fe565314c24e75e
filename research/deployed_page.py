"""The exported page in a real browser: time to the first ellipses, frames/s, parity with Python, screenshots.

    halopose export --web -o deployed
    pip install playwright        # and Chromium, from your system's packages
    python -m research.deployed_page deployed --chromium /usr/bin/chromium -o pages

A film made of a photograph that comes with ultralytics replaces the camera.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import ultralytics
from playwright.sync_api import Page, sync_playwright

from halopose.data.images import read_image
from halopose.deploy.web import serve
from halopose.runtime.predict import Model, _triangle

PHOTOGRAPH = Path(ultralytics.__file__).parent / "assets" / "bus.jpg"
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the page and keep the log."""
    opened = serve.server(str(folder), 0)
    threading.Thread(target=opened.serve_forever, daemon=True).start()
    yield f"http://localhost:{opened.server_port}"
    opened.shutdown()


def write_film(path: Path) -> None:
    """An endless film of the moving photograph."""
    image = cv2.resize(read_image(PHOTOGRAPH), (480, 640))
    with path.open("wb") as file:
        for step in range(60):
            shift = np.array([[1, 0, 12 * np.sin(step / 60 * 2 * np.pi)], [0, 1, 0]], np.float32)
            frame = cv2.warpAffine(image, shift, (480, 640), borderMode=cv2.BORDER_REFLECT)
            file.write(cv2.imencode(".jpg", frame)[1].tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deployed", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--output", "-o", type=Path, default=Path("pages"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    film = options.output / "film.mjpeg"
    write_film(film)
    web = options.deployed / "web"
    cv2.imwrite(str(web / "check.png"), read_image(PHOTOGRAPH))
    flags = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream", "--no-sandbox"]
    with served(web) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=options.chromium, args=[*flags, f"--use-file-for-fake-video-capture={film}"]
        )
        page, errors = opened(browser, SIZES["desktop"], "light")
        check_camera(page, address)
        check_picture(page, address, options.deployed)
        print("console errors:", errors or "none")
        page.close()
        for name, size in SIZES.items():
            for scheme in ("light", "dark"):
                picture(browser, address, size, scheme, options.output / f"{name}-{scheme}")
        browser.close()
    (web / "check.png").unlink()


def opened(browser: Any, size: tuple[int, int], scheme: str) -> tuple[Page, list[str]]:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(f"failed: {request.url}"))
    return page, errors


def check_camera(page: Page, address: str) -> None:
    page.goto(f"{address}/?camera&size=320")
    page.wait_for_function("window.halopose.first !== null", timeout=60_000)
    seen = page.evaluate("[window.halopose.ready, window.halopose.first]")
    print(f"model ready {seen[0] / 1e3:.1f} s after load, first ellipses {seen[1] / 1e3:.1f} s")
    page.wait_for_timeout(8000)
    rate, text = page.evaluate("[window.halopose.rate, document.getElementById('status').textContent]")
    print(f"camera at 320: {rate:.1f} frames a second; {text}")


def check_picture(page: Page, address: str, deployed: Path) -> None:
    """Covariances of the page against those of the runtime in Python, on a losslessly compressed picture."""
    page.goto(f"{address}/?picture=check.png")
    page.wait_for_function("window.halopose.poses.length > 0", timeout=60_000)
    poses = page.evaluate("window.halopose.poses")
    expected = Model(str(deployed / "model.onnx")).predict(read_image(PHOTOGRAPH))
    covariance = np.array([pose["covariance"] for pose in poses])
    wanted = _triangle(expected.covariance)
    gap = np.abs(covariance - wanted).max(2) / wanted.max(2)
    places = np.abs(np.array([pose["keypoints"] for pose in poses]) - expected.keypoints).max()
    same = np.array_equal([pose["keep"] for pose in poses], expected.keep)
    print(f"{len(poses)} of {len(expected)} persons, kept alike: {same}")
    print(f"covariances within {gap.max():.1e}, keypoints within {places:.1e} px of Python's")


def picture(browser: Any, address: str, size: tuple[int, int], scheme: str, path: Path) -> None:
    page, _ = opened(browser, size, scheme)
    page.goto(address)
    page.wait_for_function("window.halopose.ready !== null", timeout=60_000)
    page.screenshot(path=f"{path}-empty.png", full_page=True)
    page.goto(f"{address}/?picture=check.png")
    page.wait_for_function("window.halopose.poses.length > 0", timeout=60_000)
    page.screenshot(path=f"{path}.png", full_page=True)
    overflow = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    print(f"{path.name}: {'wider than the window' if overflow else 'fits'}")
    page.close()


if __name__ == "__main__":
    main()
