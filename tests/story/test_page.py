# SPDX-License-Identifier: Apache-2.0
"""The timeline opens offline in a real browser, and nothing in a log can change that."""

import html
import json
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.demo.__main__ import draw_timeline
from tests.story.logs import ended, run_of, settled
from ucm.story.collected import collect
from ucm.story.drawing import draw
from ucm.story.files import Reading, find_logs, read_logs
from ucm.story.lines import parse
from ucm.story.lives import lives_of
from ucm.story.page import page_of

CHROMIUM = shutil.which("chromium")
HOSTILE = "</script><img src=x onerror=alert(1)>]]><!--&lt;\u2028`${1}`"


def page(*lines):
    """Return the page of lines."""
    parsed = (parse(json.dumps(each).encode(), "worker-0-8") for each in lines)
    return page_of(draw(lives_of(collect(parsed))))


def page_of_run(tmp_path):
    """Return the page of a run of three requests that overlap."""
    files = find_logs(run_of(tmp_path / "run"))
    return page_of(draw(lives_of(collect(read_logs(files, Reading())))))


class Elements(HTMLParser):
    """Names of elements and values of attributes, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.names, self.values, self.data = [], [], ""
        self._is_data = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Take note of an element."""
        self.names.append(tag)
        self.values += [value for _, value in attrs]
        self._is_data = ("id", "data") in attrs

    def handle_data(self, data):
        """Take note of the data."""
        if self._is_data:
            self.data += data
            self._is_data = False


class TestPage:
    @pytest.mark.slow
    @given(st.text(max_size=60) | st.just(HOSTILE))
    def test_whatever_a_request_is_called_is_data(self, name):
        """Nothing that a log says becomes an element, an attribute or a script."""
        plain, told = Elements(page(ended("r"))), Elements(page(ended(name)))
        assert plain.names == told.names
        assert plain.values == told.values
        (bar,) = json.loads(told.data)["lanes"][0]["bars"]
        assert name == bar["name"]

    def test_only_its_own_script_and_style_are_allowed(self):
        """The policy names two digests, and nothing that could be fetched."""
        text = page(ended())
        policy = re.search('Content-Security-Policy" content="([^"]*)"', text)[1]
        allowed = dict(part.split(None, 1) for part in policy.split("; "))
        assert {
            "default-src",
            "style-src",
            "script-src",
            "base-uri",
            "form-action",
        } == {*allowed}
        for name in ("style-src", "script-src"):
            assert re.fullmatch("'sha256-[A-Za-z0-9+/=]+'", allowed.pop(name))
        assert {"'none'"} == set(allowed.values())

    def test_no_address_is_in_it(self):
        """There is nothing that a browser could ask for."""
        text = page(ended(), settled())
        assert [] == re.findall(
            r"https?://|//cdn|@import|url\((?!#)|\bsrc=|\bhref=", text
        )


class TestDemo:
    def test_demo_draws_what_its_engines_did(self, tmp_path, capsys):
        """The demo ends with a page, made by the command that an operator has."""
        wanted = tmp_path / "new" / "timeline.html"
        assert wanted == draw_timeline(run_of(tmp_path / "run"), wanted)
        assert "r1" in Elements(wanted.read_text()).data
        assert "" == capsys.readouterr().out

    def test_demo_without_a_log_fails(self, tmp_path):
        """A log that is missing is no timeline, and no success."""
        with pytest.raises(SystemExit) as caught:
            draw_timeline(tmp_path, tmp_path / "timeline.html")
        assert 3 == caught.value.code


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
class TestBrowser:
    def browse(self, tmp_path, text, *options):
        """Open a page in a browser that can reach nothing; return what it printed."""
        path = tmp_path / "timeline.html"
        path.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"),
                *(
                    "--proxy-server=127.0.0.1:1",
                    f"--user-data-dir={tmp_path / 'profile'}",
                ),
                *("--enable-logging=stderr", *options, path.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        problems = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        assert [] == problems
        return done.stdout

    def test_stages_of_requests_that_overlap_are_drawn(self, tmp_path):
        """Requests, stages and ends of three requests that overlap are in the document,
        told apart by words and by signs, and nothing was asked of a network."""
        dom = self.browse(tmp_path, page_of_run(tmp_path), "--dump-dom")
        bars = re.findall(
            r'<g class="bar [^>]*data-kind="(\w+)" data-outcome="(\w+)" data-marks="([\w ]*)"',
            dom,
        )
        assert [
            ("load", "failed", ""),
            ("requests", "aborted", "failed"),
            ("requests", "finished", ""),
            ("requests", "finished", "preempted refused"),
            ("save", "committed", ""),
            ("save", "refused", ""),
        ] == sorted(bars)
        stages = re.findall(r'class="stage" data-stage="(\w+)"', dom)
        assert {"gather": 1, "commit": 1, "fetch": 1, "scatter": 1} == {
            name: stages.count(name) for name in stages
        }
        assert 6 <= dom.count('class="sign"')

    def test_legend_names_a_stage_wherever_it_is_drawn(self, tmp_path):
        """A stage that saves and loads pass stands under both, others under their own."""
        wait = ["event_wait", 0.0, 0.01]
        lines = (
            settled("r", 1, direction=kind, edges=[wait, [name, 0.01, 0.02]])
            for kind, name in (("save", "gather"), ("load", "fetch"))
        )
        dom = self.browse(tmp_path, page(ended("r"), *lines), "--dump-dom")
        told = dom.split('id="legend"')[1].split('id="controls"')[0]
        rows = dict(
            re.findall(r"<dt>([^<]*)</dt><div class=\"items\">(.*?)</div>", told)
        )
        names = {
            title: re.findall(r"</svg>([^<]*)</span>", row)
            for title, row in rows.items()
        }
        assert ["waiting", "event wait", "gather"] == names["Stages of a save"]
        assert ["waiting", "event wait", "fetch"] == names["Stages of a load"]

    def test_one_request_is_shown_with_what_belongs_to_it(self, tmp_path):
        """A step to a request zooms to it, dims the others' bars and tells its facts."""
        click = '<script>document.getElementById("next").click()</script>'
        text = re.sub("<meta http-equiv[^>]*>", "", page_of_run(tmp_path))
        dom = self.browse(tmp_path, text.replace("</body>", click), "--dump-dom")
        bars = re.findall(r'class="bar (dim)?" [^>]*aria-label="(\w+ ?\d*),', dom)
        assert {"r1", "save 1"} == {name for dim, name in bars if not dim}
        assert {"r2", "r3", "load 2", "save 3"} == {name for dim, name in bars if dim}
        assert "evicted" in dom.split('id="facts"')[1]

    def test_hostile_names_are_shown_as_they_are(self, tmp_path):
        """A name that looks like a script is text in the browser too."""
        dom = self.browse(tmp_path, page(ended(HOSTILE[:60])), "--dump-dom")
        assert "<img" not in dom
        assert html.escape(HOSTILE[:20], quote=False) in dom

    @pytest.mark.parametrize("width", [1280, 800])
    def test_a_picture_is_made_of_it(self, tmp_path, width):
        """The page is drawn at both widths, and is not empty."""
        target = tmp_path / "picture.png"
        self.browse(
            tmp_path,
            page_of_run(tmp_path),
            f"--screenshot={target}",
            f"--window-size={width},900",
        )
        picture = target.read_bytes()
        assert (width, 900) == struct.unpack(">II", picture[16:24])
        assert 10_000 < len(picture)
