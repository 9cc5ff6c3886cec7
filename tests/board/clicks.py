"""A recipe by clicks: a model, data, the form, a start, as a person goes from page to page."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from browsers import eventually
from safetensors.numpy import load_file

SHORT = {"train.steps": "4", "train.batch_size": "2", "data.max_length": "128"}


def jsonl(path: pathlib.Path, records: list[dict]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def follow(driver: Any, page: str, name: str = "") -> None:
    """Clicks a page's link in the navigation, which says `name`."""
    link = eventually(lambda: driver.find_element("css selector", f"nav a[data-view={page}]"))
    assert not name or link.text == name
    link.click()


def pick_model(driver: Any, path: str) -> None:
    """Model: takes one that lies in the folders over into the recipe."""
    follow(driver, "model")
    button = f"button[aria-label$='{path}']"
    eventually(lambda: driver.find_element("css selector", button)).click()
    eventually(lambda: f"path: {path}" in yaml(driver) or f"model: {path}" in yaml(driver))


def put(driver: Any, path: str, value: str) -> None:
    """Types a value into a field of the form, which is searched for where it is not in front; waits until the
    YAML holds it."""

    def try_typing() -> bool:
        field = driver.find_element("css selector", f"[data-path='{path}'] :is(input, textarea)")
        if not field.is_displayed():
            search = driver.find_element("id", "search")
            search.clear()
            search.send_keys(path)
        field.clear()
        field.send_keys(value + "\t")
        return True

    eventually(try_typing)
    eventually(lambda: value in yaml(driver))


def yaml(driver: Any) -> str:
    """Returns the recipe shown next to the form."""
    return driver.find_element("id", "yaml").get_property("value")


def send_file(driver: Any, path: pathlib.Path) -> None:
    follow(driver, "data")
    eventually(lambda: driver.find_element("id", "upload")).send_keys(str(path))


def run_ends(driver: Any, root: pathlib.Path, output: str, seconds: float = 300) -> dict[str, Any]:
    """Starts, waits for the end, and returns the tensors that were written."""
    driver.find_element("css selector", ".launcher button.primary").click()
    eventually(lambda: "#/runs/" in driver.current_url)
    eventually(lambda: driver.find_elements("css selector", ".head .state.finished"), seconds)
    return load_file(root / output / "adapter" / "adapter_model.safetensors")
