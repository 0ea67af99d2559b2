"""The page shows what the run left, lets nothing in it run, and works in a browser, narrow and wide, light and dark."""

import base64
import html
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from PIL import Image

import report
from config import Settings
from report import ReportError, last_picture, main, make_page, number, read_metrics, read_run, read_samples, text

HOSTILE = (
    "</script><script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"
    "<!-- @DATA@ @TITLE@"
)


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(step, correct, completion="6 * 7 = 42", **more):
    row = dict(
        step=step, split="train", question="What is 6 * 7?", completion=completion, answer="42", gold="42", reward=correct,
        correct=correct, tokens=9, finished=True, advantage=0.5,
    )
    return row | more


def a_run(folder, steps=6, **settings):
    """A folder as a run leaves it; the values say what they are: step N has the reward N / 10."""
    rows = [{"step": 0, "validation/accuracy": 0.25, "validation/accuracy_low": 0.2, "validation/accuracy_high": 0.3}]
    for n in range(1, steps + 1):
        rows.append({
            "step": n, "reward/mean": n / 10, "reward/correct": n / 10,
            "completion/length_mean": 20 + n, "completion/tokens": 100, "completion/truncated_share": 0.0,
            "train/loss": 1e-9 * n, "train/grad_norm": None if n == 3 else 0.1 * n, "train/entropy": 1 / n,
            "sampler/logprob_diff_max": 1e-6, "sampler/logprob_diff_mean": 0.0,
            "time/sample": 1.0, "time/train": 2.5, "time/other": 0.5, "time/step": 4.0, "throughput/tokens_per_s": 25.0,
            "pipeline/bubble_measured": 0.2, "pipeline/bubble_theory": 0.1,
        })
    rows.append({"step": steps, "validation/accuracy": 0.75, "validation/accuracy_low": 0.7, "validation/accuracy_high": 0.8})
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "samples.jsonl", [sample(n, float(n % 2)) for n in range(12)])
    about = {
        "settings": vars(Settings(batch_size=4)) | settings, "git_commit": "abcdef0123456789-dirty",
        "packages": {"torch": "2.13.0"}, "plan": "stage 0: layers 0-1",
    }
    (folder / "settings.json").write_text(json.dumps(about))
    (folder / "timeline").mkdir(exist_ok=True)
    for n in (2, 10):
        Image.new("RGB", (1800, 160), (n, 200, 200)).save(folder / "timeline" / f"step-{n}.png")
    return folder


def data_in(page):
    """What the browser reads from the page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found.group(1), parse_constant=pytest.fail)  # NaN and Infinity are no JSON for a browser


# ------------------------------------------------------------------------------------------------ reading
def test_the_page_holds_the_values_of_metrics_jsonl(tmp_path):
    folder = a_run(tmp_path / "run")
    main([str(folder)])
    metrics = data_in((folder / "report.html").read_text())["runs"][0]["metrics"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row if name != "step"}
    assert set(metrics) == names and len(names) == 20
    for name in names:
        wanted = [(row["step"], row[name]) for row in rows if name in row]
        assert list(zip(metrics[name]["steps"], metrics[name]["values"])) == wanted, name
    assert metrics["train/grad_norm"]["values"][2] is None


def test_torn_lines_and_values_that_are_no_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"step": 1, "a": 1.0, "b": NaN, "c": "text", "d": true}', '{"step": 2, "a": 1e999, "b": -Infinity}',
        '{"step": 3, "a": 5.0}', "", '{"a": 7.0}', '["step"]', '{"step": 2.5, "a": 1}', "[" * 100_000,
        '{"step": 3, "a": 6.0}', '{"step": 0, "a": 9}', '{"step": 4, "a": 0.1',
    ]
    path.write_text("\n".join(lines))
    metrics, unreadable = read_metrics(path)
    assert metrics["a"] == {"steps": [0, 1, 2, 3], "values": [9, 1.0, None, 6.0]}  # by step; the later line counts
    assert metrics["b"] == {"steps": [1, 2], "values": [None, None]}
    assert "c" not in metrics and metrics["d"]["values"] == [None]
    assert unreadable == 5
    page = make_page([read_run(tmp_path)])
    assert data_in(page)["runs"][0]["notes"] == ["metrics.jsonl: 5 unreadable lines passed over"]


@pytest.mark.parametrize("value, wanted", [
    (1, 1), (-0.5, -0.5), (True, None), (None, None), ("1", None), (float("nan"), None), (float("-inf"), None), (10**400, None),
])
def test_numbers(value, wanted):
    assert number(value) == wanted


def test_the_summary(tmp_path):
    run = read_run(a_run(tmp_path / "run", steps=20))
    s = run["summary"]
    assert s["accuracy"] == [
        {"step": 0, "value": 0.25, "low": 0.2, "high": 0.3}, {"step": 20, "value": 0.75, "low": 0.7, "high": 0.8},
    ]
    assert (s["steps"], s["seconds"], s["tokens"], s["tokens_per_s"]) == (20, 80.0, 2000, 25.0)
    assert s["reward"] == pytest.approx(1.55)  # of the steps 11 to 20
    assert (s["bubble"], s["bubble_theory"]) == (pytest.approx(0.2), pytest.approx(0.1))


def test_a_run_with_nothing_but_one_validation(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0, "validation/accuracy": 0.5}])
    run = data_in(make_page([read_run(tmp_path)]))["runs"][0]
    assert run["summary"]["accuracy"] == [{"step": 0, "value": 0.5, "low": None, "high": None}]
    assert run["summary"]["tokens_per_s"] is None
    assert (run["samples"], run["about"], run["timeline"], run["notes"]) == ([], None, None, [])


def test_the_last_picture_is_that_of_the_latest_step(tmp_path):
    folder = a_run(tmp_path / "run")
    picture = last_picture(folder / "timeline")
    assert picture["name"] == "step-10"  # not step-2, which comes later in the alphabet
    assert base64.b64decode(picture["png"]) == (folder / "timeline" / "step-10.png").read_bytes()


def test_samples_of_odd_forms(tmp_path):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1?"}]
    odd = sample(1, None, question=messages, gold=14, answer=None, finished=False)
    write_lines(tmp_path / "samples.jsonl", [odd, {"step": 2}])
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"step": 3, "question": "to')
    (first, second), total, unreadable = read_samples(tmp_path / "samples.jsonl")
    assert first["question"] == "system: Be short.\n\nuser: 1 + 1?" and first["gold"] == "14"
    assert (first["answer"], first["correct"], first["finished"]) == (None, None, False)
    assert second["completion"] is None and (total, unreadable) == (3, 1)


def test_of_many_samples_some_are_taken_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "SAMPLES", 7)
    write_lines(tmp_path / "samples.jsonl", [sample(n, 1.0) for n in range(100)])
    samples, total, _ = read_samples(tmp_path / "samples.jsonl")
    steps = [s["step"] for s in samples]
    assert len(steps) == 7 and total == 100 and steps[-1] == 99
    assert {b - a for a, b in zip(steps, steps[1:])} == {14, 15}
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "a": 1}])
    assert read_run(tmp_path)["notes"] == ["samples.jsonl: 7 of 100 samples are on this page, evenly over the run"]


def test_long_texts_lose_their_middle():
    long = text("a" * 30_000 + "the answer is 7")
    assert len(long) < 20_100 and long.endswith("the answer is 7") and "10,015 characters left out" in long


def test_settings_are_compared_with_the_defaults(tmp_path):
    run = read_run(a_run(tmp_path / "run", learning_rate=0.5, share_prompts=False, of_a_later_version=3))
    about = run["about"]
    assert set(about["changed"]) == {"batch_size", "learning_rate", "share_prompts", "of_a_later_version"}
    shown = {name: about["settings"][name] for name in ("share_prompts", "learning_rate", "split")}
    assert shown == {"share_prompts": "off", "learning_rate": "0.5", "split": ""}
    for broken in ("{", "[]", '{"settings": 3}', '{"packages": []}[', '{"packages": [1]}'):
        (tmp_path / "run" / "settings.json").write_text(broken)
        run = read_run(tmp_path / "run")
        assert run["about"] is None and run["notes"] == ["settings.json cannot be read and is left out"]


# ------------------------------------------------------------------------------------------------ the page
def test_texts_cannot_become_markup(tmp_path):
    folder = a_run(tmp_path / "<img src=x>", prompt_template=HOSTILE)
    write_lines(folder / "samples.jsonl", [sample(1, 1.0, HOSTILE, question=HOSTILE, answer=HOSTILE, gold="\ud800")])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 7, HOSTILE: 1.0}) + "\n")
    main([str(folder)])
    page = (folder / "report.html").read_text()
    assert page.count("<script") == 2 and page.count("</script>") == 2 and "<img" not in page
    assert f"<title>{html.escape('<img src=x>')}</title>" in page
    run = data_in(page)["runs"][0]
    assert run["samples"][0]["completion"] == HOSTILE and run["metrics"][HOSTILE]["values"] == [1.0]


def test_the_page_loads_nothing_and_no_markup_is_made_from_text():
    page = report.TEMPLATE.read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', page).group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-@DIGEST@';") and "img-src data:;" in policy
    assert set(re.findall(r"https?://[^\"']*", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|@import|url\(|<link|\ssrc=", page)
    for needed in ('<html lang="en">', 'name="viewport"', "prefers-color-scheme: dark", "@media print", "<noscript>"):
        assert needed in page


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_of_texts_and_lines_in_both_schemes():
    schemes = re.findall(r"--page: [^}]*", report.TEMPLATE.read_text())
    assert len(schemes) == 2
    for scheme in schemes:
        colours = {name: "#" + "".join(c * 2 for c in value) if len(value) == 3 else "#" + value
                   for name, value in re.findall(r"--(\w+): #(\w+);", scheme)}

        def contrast(a, b, colours=colours):
            high, low = sorted((luminance(colours[a]), luminance(colours[b])), reverse=True)
            return (high + 0.05) / (low + 0.05)

        for ink in ("ink", "soft"):
            assert min(contrast(ink, "page"), contrast(ink, "card")) >= 4.5, ink
        for ink, ground in (("ink", "mark"), ("good", "card"), ("bad", "card"), ("bad", "page")):
            assert contrast(ink, ground) >= 4.5, (ink, ground)
        assert all(contrast(f"c{i}", "card") >= 3 for i in range(8))


def test_several_runs_are_told_apart(tmp_path):
    folders = [a_run(tmp_path / "a" / "seed"), a_run(tmp_path / "b" / "seed", seed=1), a_run(tmp_path / "other")]
    output = tmp_path / "page.html"
    main([*map(str, folders), str(folders[0]), "--output", str(output)])
    runs = data_in(output.read_text())["runs"]
    assert [run["name"] for run in runs] == [str(folders[0]), str(folders[1]), "other"]
    assert not (folders[0] / "report.html").exists()


@pytest.mark.parametrize("make, words", [
    (lambda f: f / "nowhere", "is not a folder"),
    (lambda f: f, "holds no metrics.jsonl"),
    (lambda f: (f / "metrics.jsonl").write_text('{"step": 1, "rew') and f, "holds no readable line yet"),
    (lambda f: (f / "metrics.jsonl").mkdir() or f, "holds no metrics.jsonl"),
])
def test_a_folder_without_a_run_is_refused_in_one_sentence(tmp_path, capsys, make, words):
    with pytest.raises(SystemExit) as stop:
        main([str(make(tmp_path))])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and words in error and error.count("\n") == 1
    with pytest.raises(ReportError):
        read_run(make(tmp_path / "again") if "nowhere" in words else tmp_path)


def test_an_output_that_cannot_be_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(a_run(tmp_path / "run")), "--output", str(tmp_path / "no" / "page.html")])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'no' / 'page.html'}: No such file or directory\n"


def test_it_starts_fast_and_without_torch():
    code = "import sys, report; print(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False" and time.perf_counter() - began < 5


# ------------------------------------------------------------------------------------------------ in a browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

# The page stands in a frame of the wanted width, since a window cannot be narrower than 500 pixels; this works the page and
# writes what it finds.
DRIVER = """<!doctype html><iframe src="PAGE" style="width: WIDTHpx; height: 900px; border: 0"></iframe><pre></pre><script>
const frame = document.querySelector("iframe"), found = {};
frame.addEventListener("load", () => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const all = (selector, within = page) => [...within.querySelectorAll(selector)];
  const one = (selector, within = page) => within.querySelector(selector);
  const texts = (selector, within) => all(selector, within).map((e) => e.textContent);
  const key = (target, name) => target.dispatchEvent(new view.KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
  const put = (label, value) => {
    const field = all(".controls label").find((l) => l.firstChild.textContent === label).lastChild;
    field.value = value;
    for (const kind of ["input", "change"]) field.dispatchEvent(new view.Event(kind, { bubbles: true }));
  };
  const outside = (e) => !e.closest(".scroll, svg, select") && e.getBoundingClientRect().right > frame.clientWidth + 0.5;
  const charts = () => all("figure").map((figure) => {
    const svg = one("svg[role=img]", figure), legend = one(".legend", figure), place = (e) => e.getBoundingClientRect();
    return {
      title: one("h3", figure).textContent, read: one("p", figure).textContent, legend: legend.textContent,
      label: svg.getAttribute("aria-label"), paths: all("path", svg).map((p) => p.getAttribute("d")),
      marks: all("path, circle", svg).length, bad: /NaN|undefined|Infinity/.test(figure.outerHTML),
      drawn_at: svg.viewBox.baseVal.width / place(svg).width,
      apart: place(one("figcaption", figure)).bottom <= place(svg).top && place(svg).bottom <= place(legend).top,
    };
  });
  const turn = () => { // through the samples
    const where = () => one("#where").textContent, [back, next] = all(".pager button"), group = one("[role=group]");
    const shown = [where()];
    const then = (...more) => shown.push(where(), ...more);
    next.click(); then();
    key(group, "ArrowRight"); then(next.disabled);
    key(group, "ArrowRight"); then();
    back.click(); then();
    put("verdict", "wrong"); then();
    put("step", "4"); then();
    put("verdict", "right"); then();
    put("verdict", ""); put("step", ""); put("text", "NEEDLE"); then(...texts("#samples mark"));
    return shown;
  };
  const point = () => { // at the curve of the rewards
    const figure = all("figure").find((f) => one("h3", f).textContent === "Reward"), svg = one("svg[role=img]", figure);
    const box = svg.getBoundingClientRect(), legend = one(".legend", figure), shown = [];
    svg.dispatchEvent(new view.PointerEvent("pointermove", { clientX: box.right - 10, clientY: box.top + 50, bubbles: true }));
    shown.push(legend.textContent);
    key(svg, "ArrowLeft"); shown.push(legend.textContent);
    svg.dispatchEvent(new view.PointerEvent("pointerleave")); shown.push(legend.textContent);
    return shown;
  };
  for (const details of all("details")) details.open = true;
  setTimeout(() => {
    found.ready = page.documentElement.dataset.ready;
    found.title = page.title;
    found.width = [page.documentElement.scrollWidth, page.documentElement.clientWidth];
    found.outside = all("main *").filter(outside).map((e) => e.outerHTML.slice(0, 80));
    found.text = page.body.innerText;
    found.background = view.getComputedStyle(page.body).backgroundColor;
    found.charts = charts();
    found.scripts = all("script").length;
    found.pictures = all("img").map((i) => i.naturalWidth);
    found.unnamed = all("input, select").filter((e) => !e.closest("label")).length
      + all("img:not([alt]), [role]:not([aria-label])").length;
    found.differs = texts("tr.differs th");
    found.paging = one("#where") && turn();
    found.pointed = point();
    put("metric", "time/train");
    frame.style.width = "700px"; // a telephone that is turned
    view.dispatchEvent(new view.Event("resize")); // without a screen the browser makes none
    found.resized = charts();
    document.querySelector("pre").textContent = JSON.stringify(found);
  }, 300);
});
</script>"""


def browse(page, tmp_path, width=1280, dark=False):
    """What DRIVER found; fails when the browser's console says anything."""
    driver = tmp_path / "driver.html"
    driver.write_text(DRIVER.replace("PAGE", page.as_uri()).replace("WIDTH", str(width)))
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files", "--enable-logging=stderr",
        "--window-size=1400,1000", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]
    done = subprocess.run([CHROMIUM, *flags, driver.as_uri()], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    found = re.search("<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found and found.group(1), done.stdout[-1000:] + done.stderr[-1000:]
    return json.loads(html.unescape(found.group(1)))


@needs_chromium
@pytest.mark.parametrize("width, dark", [(360, False), (360, True), (1280, False), (1280, True)])
def test_in_a_browser(tmp_path, width, dark):
    name = "a_run_with_a_name_that_is_longer_than_the_page_is_wide_on_a_telephone"
    folder = a_run(tmp_path / name, prompt_template="x" * 300)
    with open(folder / "samples.jsonl", "a") as file:
        file.write(json.dumps(sample(11, 0.0, HOSTILE + " needle " + "w" * 500, answer=None)) + "\n")
    main([str(folder)])
    found = browse(folder / "report.html", tmp_path, width, dark)
    assert found["ready"] == "yes" and found["title"] == folder.name
    assert found["width"][0] <= found["width"][1] == width and found["outside"] == []
    assert found["background"] == ("rgb(20, 23, 26)" if dark else "rgb(244, 245, 247)")
    assert found["scripts"] == 2 and found["pictures"] == [1800] and found["unnamed"] == 0
    assert "commit abcdef0123-dirty" in found["text"] and "25.0 % → 75.0 %" in found["text"]
    assert "step 0 (20.0 to 30.0 %), step 6 (70.0 to 80.0 %)" in found["text"]
    titles = [
        "Held-out accuracy", "Reward", "Length", "Truncated completions", "Entropy", "Sampler mismatch", "Gradient norm", "Loss",
        "Throughput", "Pipeline bubble", "Step time by phase",
    ]
    assert [c["title"] for c in found["charts"]] == titles + ["completion/length_mean"]  # the last one is for any metric
    assert found["resized"][-1]["title"] == "time/train"
    for chart in found["charts"] + found["resized"]:
        assert chart["drawn_at"] == pytest.approx(1, abs=0.01) and chart["apart"], chart
        assert chart["marks"] and not chart["bad"] and chart["read"] and chart["title"] in chart["label"], chart
    assert found["paging"] == [
        "1 to 5 of 13", "6 to 10 of 13", "11 to 13 of 13", True, "11 to 13 of 13", "6 to 10 of 13", "1 to 5 of 7",
        "1 to 1 of 1", "none matches", "1 to 1 of 1", "needle",
    ]
    assert found["pointed"] == ["step 6mean reward 0.6", "step 5mean reward 0.5", "lastmean reward 0.6"]


@needs_chromium
def test_in_a_browser_the_curve_is_at_its_values_and_null_is_a_gap(tmp_path):
    folder = a_run(tmp_path / "run")
    main([str(folder)])
    charts = {c["title"]: c for c in browse(folder / "report.html", tmp_path)["charts"]}
    points = [tuple(map(float, p)) for p in re.findall(r"([\d.]+) ([\d.]+)", charts["Reward"]["paths"][0])]
    assert len(points) == 6
    (x1, y1), (x6, y6) = points[0], points[-1]
    for n, (x, y) in enumerate(points):  # rewards 0.1 to 0.6 at steps 1 to 6: a straight line
        assert x == pytest.approx(x1 + n * (x6 - x1) / 5, abs=0.02) and y == pytest.approx(y1 + n * (y6 - y1) / 5, abs=0.02)
    assert y1 > y6  # up is more
    assert charts["Reward"]["paths"][0].count("M") == 1
    assert charts["Gradient norm"]["paths"][0].count("M") == 2  # step 3 has no value
    assert len(charts["Step time by phase"]["paths"]) == 3
    assert charts["Step time by phase"]["legend"] == "meansample 1train 2.5other 0.5"


@needs_chromium
def test_in_a_browser_several_runs_and_runs_without_most_things(tmp_path):
    one, two = a_run(tmp_path / "one"), a_run(tmp_path / "two", steps=50, batch_size=9)
    only = {"step": 1, "reward/mean": None, "reward/correct": 0.5, "sampler/logprob_diff_max": 0.0}
    write_lines(tmp_path / "bare" / "metrics.jsonl", [only])
    output = tmp_path / "page.html"
    main([str(one), str(two), str(tmp_path / "bare"), "--output", str(output)])
    found = browse(output, tmp_path, width=360)
    assert "3 runs compared" in found["text"] and found["width"][0] <= 360 and found["outside"] == []
    assert not any(c["bad"] for c in found["charts"])
    legends = {c["title"]: c["legend"] for c in found["charts"]}
    assert found["differs"] == ["batch_size"]
    assert legends["Length"] == "lastone 26two 70" and "Step time by phase: two" in legends
    assert "bare: mean reward –" in legends["Reward"] and "bare: correct alone 0.5" in legends["Reward"]
    main([str(tmp_path / "bare")])
    alone = browse(tmp_path / "bare" / "report.html", tmp_path, width=360)
    assert [c["title"] for c in alone["charts"]][:2] == ["Reward", "Sampler mismatch"]
    assert not any(c["bad"] for c in alone["charts"])
    for words in ("no validation in this run", "No samples.jsonl", "No settings.json"):
        assert words in alone["text"]
