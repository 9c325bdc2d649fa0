# SPDX-License-Identifier: Apache-2.0
"""The documentation: it makes a site, its code is code, and what it names is there."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
import yaml

from scripts.docs_site import without_ways_out
from scripts.pages import ROOT, read
from ucm.cli.main import COMMANDS, cli
from ucm.config import UCMConfig

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
OUTSIDE = ROOT / "examples" / "third_party_store" / "README.md"
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
OURS = ("https://squidfunk.github.io/mkdocs-material/", "https://ui.perfetto.dev")
"""What a page may lead to, for who follows it: the site's own maker, and a viewer."""
OURS_TO_RUN = ("examples", "benchmarks", "scripts", "tests", "ucm")
"""Packages of the repository."""


@attrs.frozen
class Block:
    """A fenced block of code."""

    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        """Return where it is, for the names of tests."""
        return f"{self.page.relative_to(ROOT)}:{self.text[:20]!r}"


def blocks(*languages: str) -> list[Block]:
    """Return all fenced blocks of some languages."""
    return [
        Block(page, language, textwrap.dedent(text))
        for page in PAGES
        for _, language, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if language in languages
    ]


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command of a console, or of a shell."""
    text = block.text
    if block.language == "console":
        given = re.findall(r"^\$ (.*(?:\n(?!\$ ).*)*)", text, re.MULTILINE)
    else:
        given = [text]
    told = []
    for one in given:
        words = shlex.split(one, comments=True)
        told.append(words)
    return told


def settings_in(words: list[str]) -> dict[str, Any]:
    """Return our settings in a command that serves."""
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    return given["kv_connector_extra_config"]


class Links(HTMLParser):
    """Collects what a page fetches, and what it leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.followed: list[str] = []

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        """Take note of one tag's addresses."""
        for name, value in given:
            if name == "src" or (name == "href" and tag == "link"):
                self.fetched.append(value or "")
            elif name == "href":
                self.followed.append(value or "")


class TestCode:
    @pytest.mark.parametrize("block", blocks("python"), ids=str)
    def test_python_is_python(self, block: Block) -> None:
        """Each block compiles, with await where a host would write it."""
        compile(block.text, str(block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    @pytest.mark.parametrize("block", blocks("json", "yaml", "toml"), ids=str)
    def test_data_is_read(self, block: Block) -> None:
        """Each block is what its fence says."""
        readers = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
        assert readers[block.language](block.text) is not None

    @pytest.mark.parametrize("block", blocks("console", "bash", "shell", "sh"), ids=str)
    def test_commands_are_whole_and_name_what_is_there(self, block: Block) -> None:
        """Quotes are closed, make knows the targets, modules and extras exist, and vLLM
        would be given settings that we take."""
        for words in commands(block):
            for at, word in enumerate(words):
                rest = words[at + 1 :]
                assert not word.startswith("[--"), "no shell takes it so"
                if word == "make":
                    assert f"\n{rest[0]}:" in (ROOT / "Makefile").read_text()
                elif word == "-m" and rest[0].split(".")[0] in OURS_TO_RUN:
                    place = ROOT / rest[0].replace(".", "/")
                    assert place.with_suffix(".py").exists() or place.is_dir(), word
                elif word == "ucm" and at == 0:
                    assert "" == misfit(rest[:2]), rest
                elif word == "--kv-transfer-config":
                    check_transfer(json.loads(rest[0]))

    def test_recipe_for_two_npus_is_kept_as_text(self) -> None:
        """S3-13: the page has set-up, command, and the file that the numbers go to; the
        engine's benchmark knows every option of it."""
        found = [
            words
            for block in blocks("console")
            if block.page.name == "npu.md"
            for words in commands(block)
            if "vllm" in words
        ]
        (serve,) = (
            words for words in found if "serve" in words and "bench" not in words
        )
        (bench,) = (words for words in found if "bench" in words)
        assert "2" == serve[serve.index("--tensor-parallel-size") + 1]
        (tier,) = settings_in(serve)["tiers"]
        assert "disk" == tier["type"]
        assert bench[bench.index("--result-filename") + 1].endswith(".json")
        options = {word for word in bench if word.startswith("--")}
        assert {"--save-result", "--percentile-metrics"} <= options
        engine = importlib.util.find_spec("vllm")
        if engine is None:
            pytest.skip("reads the engine's source, and there is none here")
        source = engine.submodule_search_locations[0]
        texts = Path(source, "benchmarks").rglob("*.py")
        known = "".join(text.read_text(encoding="utf-8") for text in texts)
        assert [] == [option for option in options if f'"{option}"' not in known]

    def test_each_kind_of_block_is_looked_at(self) -> None:
        """A language that nobody checks would be one that may rot."""
        known = {
            "python",
            "json",
            "yaml",
            "toml",
            "console",
            "bash",
            "shell",
            "sh",
            "text",
        }
        found = {
            language
            for page in PAGES
            for _, language, _ in FENCE.findall(page.read_text(encoding="utf-8"))
        }
        assert set() == found - known
        assert blocks("python")
        assert blocks("console")

    @pytest.mark.slow
    def test_program_of_the_quick_start_finds_what_it_stored(
        self, tmp_path: Path
    ) -> None:
        """As it stands on the page, twice: computed, and then loaded."""
        (block,) = (
            one for one in blocks("python") if one.page == DOCS / "quickstart.md"
        )
        text = block.text.replace("/dev/shm/ucm-quickstart", str(tmp_path / "slab"))
        told = [
            subprocess.run(
                [sys.executable, "-c", text],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for _ in range(2)
        ]
        assert [
            f"{stored} of 2 blocks were stored; the last value is 961\n"
            for stored in (0, 2)
        ] == told


def misfit(words: list[str]) -> str:
    """Return why ``ucm`` has no such command, or it takes no such words; else nothing."""
    found: click.Command = cli
    rest = list(words)
    while isinstance(found, click.Group):
        if not rest:
            return "" if found is not cli else "no command is named"
        name = rest.pop(0)
        inner = found.get_command(click.Context(found), name)
        if inner is None:
            return f"{name} is no command"
        found = inner
    context = click.Context(found, **cli.context_settings)  # it keeps its help option
    try:
        _, left, _ = found.make_parser(context).parse_args(rest)
    except click.UsageError as exc:
        return exc.format_message()
    return f"too many words: {left}" if left else ""


def check_transfer(given: dict[str, object]) -> None:
    """Check a transfer configuration as vLLM and we read it."""
    assert "UCMConnector" == given["kv_connector"]
    assert given["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
    assert "recompute" == given["kv_load_failure_policy"]
    UCMConfig.from_mapping(given["kv_connector_extra_config"])


class TestPages:
    def test_page_of_commands_has_all_of_them(self) -> None:
        """None is left out where the page is written."""
        for name in COMMANDS:
            assert f"## ucm {name}\n" in read("commands.md")

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_commands_that_a_page_names_are_there(self, page: Path) -> None:
        """``ucm ...`` within a sentence is a command that exists, and takes what stands
        behind it."""
        text = page.read_text(encoding="utf-8")
        for named in re.findall(r"`ucm ([a-z][^`]*)`", text):
            assert "" == misfit(named.split()), named
        for module, path in re.findall(r"`python (?:-m ([\w.]+)|(\S+\.py))", text):
            place = ROOT / (path or module.replace(".", "/"))
            is_ours = path or module.split(".")[0] in OURS_TO_RUN
            assert not is_ours or place.exists() or place.with_suffix(".py").exists()

    @pytest.mark.parametrize("page", [*PAGES, OUTSIDE], ids=lambda page: page.name)
    def test_nothing_is_installed_by_a_name_of_somebody_else(self, page: Path) -> None:
        """``ucm`` on a package index is another project: who follows a page installs from
        a copy of the repository, with extras that are there."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        text = page.read_text(encoding="utf-8")
        for told in re.findall(r"pip install ([^`\n]+)", text):
            for word in shlex.split(told, comments=True):
                assert not re.match(r"ucm\b", word), told
                if named := re.fullmatch(r"\.\[(.+)\]", word):
                    extras = {*named[1].split(",")}
                    assert set() == extras - {*project["optional-dependencies"]}

    def test_table_of_the_comparison_has_rows_of_both_ends(self) -> None:
        """Targets against peers that are met, and those that are missed."""
        text = read("comparison.md")
        assert "| missed |" in text
        assert "| met |" in text

    def test_readme_leads_to_pages_that_are_there(self) -> None:
        """A newcomer's first page, which no site checks."""
        text = PAGES[0].read_text(encoding="utf-8")
        assert 100 >= len(text.splitlines())
        for target in re.findall(r"\]\(([^):#]+)[)#]", text):
            assert (ROOT / target).exists(), target

    def test_link_that_leads_out_of_the_pages_is_a_name(self) -> None:
        """A site has no files of the repository; one that is not there is an error."""
        text = (
            "[a](../Makefile) [`README.md`](../README.md) [b](slab.md) [c](https://d)"
        )
        told = "a (`Makefile`) `README.md` [b](slab.md) [c](https://d)"
        assert told == without_ways_out(text, "index.md")
        with pytest.raises(FileNotFoundError, match="leads to none"):
            without_ways_out("[a](../../none)", "decisions/0001-libraries.md")


@pytest.mark.slow
class TestSite:
    def test_site_is_made_strictly_and_fetches_nothing(self, tmp_path: Path) -> None:
        """No link leads nowhere, no page is left out, and nothing of any page comes from
        another machine."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"),
                *("--site-dir", str(tmp_path / "site")),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stdout + done.stderr
        pages = list((tmp_path / "site").rglob("*.html"))
        assert len(pages) > len(PAGES) - 2
        for page in pages:
            links = Links()
            links.feed(page.read_text(encoding="utf-8"))
            assert not [one for one in links.fetched if "//" in one], page
            out = {one for one in links.followed if "//" in one}
            assert set() == out - set(OURS), page
        styles = list((tmp_path / "site").rglob("*.css"))
        assert styles
        for style in styles:
            assert not re.search(r"url\(\W*(https?:)?//", style.read_text()), style
