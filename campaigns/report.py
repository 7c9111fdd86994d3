"""Two short runs, the page of ``slime report`` about both, and what a browser makes of it.

    python -m campaigns.report FOLDER        needs ``chromium`` (Debian's package) on the path

FOLDER/report.html is the page, FOLDER/trace.json the trace of the first run, FOLDER/report.png a picture of the page
with all sections open. The command ends with an error if a script fails, a figure is not drawn, a choice of colours
changes nothing, or the page asks for anything from outside.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

RUNS: Mapping[str, tuple[str, ...]] = {
    "first": ("--num-rollout", "12", "--save-debug-train-data", "{folder}/trained-{{rollout_id}}-{{rank}}"),
    "second": ("--num-rollout", "6", "--async-buffer-size", "1"),
}
"""Name -> flags in addition to ``slime run --plugin grpo``."""

LIMIT_S = 300

# Opens every section, selects each colour, and writes what it saw into the page.
PROBE = """<script>
const seen = {errors: [], colours: {}, drawn: 0, requests: performance.getEntriesByType("resource").length};
addEventListener("error", event => seen.errors.push(event.message));
addEventListener("securitypolicyviolation", event => seen.errors.push(event.blockedURI));
for (const section of document.querySelectorAll("details")) { section.open = true; draw(section); }
for (const key of ["log-prob", "advantage", "version"]) {
  document.querySelector(".by-" + key).checked = true;
  const tokens = [...document.querySelectorAll(".tokens span:not(.prompt)")];
  seen.colours[key] = tokens.map(token => getComputedStyle(token).backgroundColor);
}
setTimeout(() => {
  seen.figures = document.querySelectorAll(".figure").length;
  const marks = ".scatterlayer path, .barlayer path, .heatmaplayer image";
  seen.drawn = [...document.querySelectorAll(".figure")].filter(place => place.querySelector(marks)).length;
  const told = document.createElement("pre");
  told.id = "seen";
  told.textContent = JSON.stringify(seen);
  document.body.append(told);
}, 20000);
</script></body>"""


def main(folder: Path) -> None:
    """Make the runs that are missing, write the page, open it, check what the browser saw."""
    browser = shutil.which("chromium")
    if browser is None:
        raise SystemExit("chromium is not on the path. Debian: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    for name, flags in RUNS.items():
        if not (folder / name).exists():
            given = [flag.format(folder=folder.resolve()) for flag in flags]
            slime("run", "--plugin", "grpo", "--device", "cpu", "--output-dir", f"{folder / name}", *given)
    page, trace = folder / "report.html", folder / "trace.json"
    slime("report", *(f"{folder / name}" for name in RUNS), "--out", f"{page}", "--trace", f"{trace}")
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE))
    seen = look(browser, probed, folder / "report.png")
    check(seen)
    spans = sum(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])
    colours = {key: len(set(found)) for key, found in seen["colours"].items()}
    print(f"{page}: {page.stat().st_size / 2**20:.1f} MiB, {seen['drawn']} of {seen['figures']} figures drawn")
    print(f"colours of tokens: {colours}; requests: {seen['requests']}; spans in the trace: {spans}")


def slime(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "slime_core", *words], check=True, timeout=LIMIT_S)


def look(browser: str, page: Path, picture: Path) -> dict[str, Any]:
    """What the probe saw; no host can be reached meanwhile."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    patience = ["--virtual-time-budget=60000", "--window-size=1300,6000"]
    url = page.resolve().as_uri()
    command = [browser, *flags, *patience]
    shown = subprocess.run([*command, "--dump-dom", url], check=True, capture_output=True, text=True, timeout=LIMIT_S)
    subprocess.run([*command, f"--screenshot={picture}", url], check=True, capture_output=True, timeout=LIMIT_S)
    found = re.search(r'<pre id="seen">(.*?)</pre>', shown.stdout)
    if found is None:
        raise SystemExit(f"the page did not run to its end: {shown.stderr[-2000:]}")
    read: dict[str, Any] = json.loads(unescape(found[1]))
    return read


def check(seen: Mapping[str, Any]) -> None:
    """Raise SystemExit where the page is not as it should be."""
    problems = list(seen["errors"])
    if seen["drawn"] != seen["figures"]:
        problems.append(f"{seen['drawn']} of {seen['figures']} figures are drawn")
    if seen["requests"]:
        problems.append(f"{seen['requests']} requests")
    choices = [tuple(found) for found in seen["colours"].values()]
    if len(set(choices)) < len(choices):
        problems.append("two choices of colours look the same")
    if problems:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
