import base64
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from wattgym.agents.episodes import EpisodeResult, PowerTrace
from wattgym.agents.figures import label
from wattgym.agents.report import render_report, write_report
from wattgym.agents.results import EvaluationResult
from wattgym.errors import UserError

HOSTILE = "$\\frac{$ <script>alert(1)</script>\"'&{{7*7}} \x07\u202e]]>--> 电力"


class Page(HTMLParser):
    """Elements, attributes and visible text of a page."""

    VOID = frozenset({"meta", "img", "br", "hr", "link", "input"})

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.open, self.rows = [], "", [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data
            if {"td", "th"} & set(self.open):
                self.rows[-1][-1] += data

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def make(scores, baselines=("ff-pi",), provenance=None, traced=True, headline="pjm_composite"):
    """`scores`: composite level of each controller; eight scenarios in two tasks."""
    rng = np.random.default_rng(0)
    rows, traces = [], []
    for name, level in scores.items():
        for j in range(8):
            score = float(np.clip(level + 0.1 * np.sin(j) + rng.normal(0, 0.01), 0, 1))
            metrics = {
                "pjm_composite": score,
                "pjm_correlation": score,
                "pjm_delay": score,
                "pjm_precision": score,
                "nrmse": 1 - score,
                "throughput_retained": 0.9,
                "energy_kwh": 12.0,
            }
            rows.append(EpisodeResult(name, f"s{j}", "regd" if j % 2 else "rega", "v100", j, metrics))
        t = np.arange(60) * 2.0
        target = 9000 + 1000 * np.sin(t / 20)
        traces.append(PowerTrace(name, "s3", t, target, target * level, np.full(60, 0.9)))
    return EvaluationResult(
        rows=rows,
        baselines=baselines,
        traces=traces if traced else (),
        provenance=provenance or {"commit": "abc123", "seeds": [1, 2], "config": {"jobs": 4}, "tuning_budget": None},
        headline=headline,
        resamples=200,
    )


def images(page):
    found = [attrs["src"] for attrs in page.all("img")]
    prefix = "data:image/svg+xml;base64,"
    assert all(src.startswith(prefix) for src in found)
    return [base64.b64decode(src.removeprefix(prefix), validate=True) for src in found]


def test_the_page_needs_no_other_file_and_no_network():
    html = render_report(make({"ppo": 0.7, "ff-pi": 0.8}))
    page = Page(html)
    assert page.open == []
    for _, attrs in page.elements:
        assert not {"href", "action", "srcset", "data", "background"} & attrs.keys()
        assert attrs.get("src", "data:").startswith("data:")
    assert "url(" not in html
    assert "@import" not in html
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    pictures = images(page)
    assert len(pictures) == 4  # differences, components, trade-off, one hour
    for svg in pictures:
        references = re.findall(rb'href="([^"]{5})', svg)
        assert all(reference.startswith((b"#", b"data:")) for reference in references)
        assert ET.fromstring(svg).tag.endswith("svg")


@pytest.mark.parametrize(("level", "place", "verdict"), [(0.6, 2, "Worse"), (0.95, 1, "Better")])
def test_the_verdict_follows_the_numbers(level, place, verdict):
    page = Page(render_report(make({"ppo": level, "ff-pi": 0.8, "static cap": 0.3}, ("ff-pi", "static cap"))))
    text = " ".join(page.text.split())
    assert f"ppo is number {place} of 3" in text
    assert f"{verdict} than ff-pi" in text.replace(f"{verdict} than static cap", f"{verdict} than ff-pi")
    ours = next(row for row in page.rows if row[:1] == ["ppo"] and "ff-pi" in row[2:3])
    assert ours[3] == verdict.lower()
    first = [row[0].split()[0] for row in page.rows if len(row) > 2][1:4]
    assert first == (["ff-pi", "ppo", "static"] if place == 2 else ["ppo", "ff-pi", "static"])


def test_a_losing_policy_is_never_in_front():
    text = " ".join(Page(render_report(make({"ppo": 0.1, "ff-pi": 0.8}))).text.split())
    assert "By PJM composite ff-pi (baseline) comes first" in text
    assert "Worse than ff-pi (-0." in text
    assert "Better than" not in text


def test_numbers_on_the_page_are_those_of_the_summary():
    result = make({"ppo": 0.7, "ff-pi": 0.8})
    page = Page(render_report(result))
    estimate = result.summary.estimates["ppo", "pjm_composite"]
    row = next(row for row in page.rows if row[:1] == ["ppo"])
    assert row[1] == f"{estimate.value:.3f}[{estimate.low:.3f}, {estimate.high:.3f}]"
    scenario = next(row for row in page.rows if row[:1] == ["s5"])
    assert scenario[1] == "regd × v100"
    assert scenario[2].startswith(f"{result.scores('ff-pi', 'pjm_composite')[0, 5]:.3f}")
    assert scenario[3].startswith(f"{result.scores('ppo', 'pjm_composite')[0, 5]:.3f}")
    assert sum(1 for row in page.rows if re.fullmatch(r"s\d", row[0] if row else "")) == 8


def test_provenance_is_shown():
    provenance = {"commit": "abc123", "seeds": [1, 2], "tuning_budget": None, "config": {"env": {"jobs": 4}}}
    text = Page(render_report(make({"ppo": 0.7, "ff-pi": 0.8}, provenance=provenance))).text
    for fact in ("abc123", "1, 2", "tuning budget", "not recorded", "jobs: 4", "200 resamples"):
        assert fact in text


def test_hostile_names_are_text_everywhere():
    provenance = {HOSTILE: HOSTILE, "config": {HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]}}
    result = make({HOSTILE: 0.7, "ff-pi": 0.8, HOSTILE + "2": 0.5}, ("ff-pi", HOSTILE + "2"), provenance)
    rows = [EpisodeResult(r.controller, r.scenario + HOSTILE, HOSTILE, HOSTILE, r.seed, r.metrics) for r in result.rows]
    traces = [
        PowerTrace(t.controller, t.scenario + HOSTILE, t.t_s, t.target_w, t.power_w, t.throughput)
        for t in result.traces
    ]
    hostile = EvaluationResult(rows, result.baselines, traces, provenance, resamples=200)
    html = render_report(hostile)
    page = Page(html)
    assert page.open == []
    assert len(page.all("script")) == 1
    assert "alert(1)" not in re.sub(r"&lt;script&gt;alert\(1\)", "", html)
    assert HOSTILE in page.text
    assert "{{7*7}}" in page.text  # not evaluated by the template
    for svg in images(page):
        root = ET.fromstring(svg)
        assert not [e for e in root.iter() if e.tag.endswith("script")]


def test_extreme_evaluations_still_render():
    one = EvaluationResult([EpisodeResult("ppo", "s", "regd", "v100", 0, {"pjm_composite": 0.5})], resamples=100)
    assert "no interval" in render_report(one)
    only_baselines = make({"ff-pi": 0.8}, traced=False)
    assert "Against each baseline" not in render_report(only_baselines)
    by_error = Page(render_report(make({"ppo": 0.7, "ff-pi": 0.8}, headline="nrmse")))
    assert "Worse than ff-pi (+0." in " ".join(by_error.text.split())
    tick = [PowerTrace("ppo", "s", [0.0], [0.0], [0.0], [0.0])]
    assert "Target against power" in render_report(EvaluationResult(one.rows, (), tick, resamples=100))
    gone = make({"ppo": 0.7, "ff-pi": 0.8})
    rows = [
        EpisodeResult(r.controller, r.scenario, r.family, r.plant_group, r.seed, {**r.metrics, "nrmse": float("nan")})
        if (r.controller, r.scenario) == ("ppo", "s1")
        else r
        for r in gone.rows
    ]
    assert "because ppo had no value there" in render_report(EvaluationResult(rows, ("ff-pi",), resamples=100))


def test_the_same_evaluation_gives_the_same_page():
    assert render_report(make({"ppo": 0.7, "ff-pi": 0.8})) == render_report(make({"ppo": 0.7, "ff-pi": 0.8}))


def test_plotting_leaves_no_global_trace():
    code = (
        "import sys, matplotlib as mpl, numpy as np\n"
        "names = [name for name in mpl.rcParams if name != 'backend']  # reading that one picks a backend\n"
        "before = [mpl.rcParams[name] for name in names]\n"
        "from wattgym.agents.episodes import EpisodeResult, PowerTrace\n"
        "from wattgym.agents.results import EvaluationResult\n"
        "from wattgym.agents.report import render_report\n"
        "rows = [EpisodeResult(c, 's', 'f', 'g', 0, {'pjm_composite': 0.5}) for c in 'ab']\n"
        "t = np.arange(9.0)\n"
        "render_report(EvaluationResult(rows, ('b',), [PowerTrace('a', 's', t, t, t, t)], resamples=100))\n"
        "assert [mpl.rcParams[name] for name in names] == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_written_whole_or_not_at_all(tmp_path):
    result = make({"ppo": 0.7, "ff-pi": 0.8}, traced=False)
    write_report(result, tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(UserError, match="cannot write"):
        write_report(result, tmp_path / "new" / "report.html" / "x.html")


def test_labels_are_one_printable_line():
    assert label("a\nb\tc\x00d\u202e") == "a b c d"
    assert label("x" * 99) == "x" * 29 + "…"
    assert label("\x00") == "?"
