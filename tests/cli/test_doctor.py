# SPDX-License-Identifier: Apache-2.0
"""``ucm doctor``: what it finds on this machine, with its remedy, and how it ends."""

import json

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.call import call
from tests.doctor.test_sizing import LLAMA
from tests.stores.slab_kit import SLOT_BYTES, open_slab
from tests.stores.test_slab_directory import FOREIGN, make_tree, tree
from tests.stores.test_slab_room import make_system
from ucm.cli import doctor as doctor_module
from ucm.configuration.sources import ENGINE
from ucm.doctor.machine import gather_machine
from ucm.stores.slab import _creation

CAPACITY = 8 << 20


def engine(path, *, capacity=CAPACITY, policy="recompute", **more):
    """Return the value of ``--kv-transfer-config`` for a store."""
    store = {"path": str(path), "capacity": capacity}
    return json.dumps(
        {
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            ENGINE: {"store": store},
            **more,
        }
    )


def examined(*arguments, transfer=None, code=None):
    """Return what the doctor finds wrong, text and remedy, for these arguments."""
    given = [] if transfer is None else ["--kv-transfer-config", transfer]
    told = call("doctor", "--json", "--no-trial", *arguments, *given)
    answer = told.json()
    wrong = [each for each in answer["findings"] if each["severity"] == "wrong"]
    assert all(each["remedy"] for each in wrong)
    assert answer["well"] is not bool(wrong)
    assert bool(wrong) == told.code
    return [f"{each['text']} {each['remedy']}" for each in wrong]


class TestFindings:
    def test_machine_and_settings_that_are_well_end_with_zero(self, tmp_path):
        """Nothing wrong is found where nothing is, and a save and load are tried."""
        told = call("doctor", "--kv-transfer-config", engine(tmp_path / "slab"))
        assert (0, "") == (told.code, told.err)
        assert "round trip" in told.out
        assert [] == [*tmp_path.iterdir()]

    def test_small_shared_memory_is_found(self):
        """X-12: a capacity that /dev/shm does not have."""
        (text, *_) = examined(transfer=engine("/dev/shm/ucm-doctor", capacity="900TiB"))
        assert "are left of /dev/shm" in text
        assert "--shm-size" in text

    def test_policy_that_fails_requests_is_found(self, tmp_path):
        """H-13: vLLM's default ends a request whose load fails."""
        (text,) = examined(transfer=engine(tmp_path / "slab", policy="fail"))
        assert "kv_load_failure_policy" in text

    def test_policy_of_the_outer_connector_counts(self, tmp_path):
        """H-13: the engine reads that of a MultiConnector, whatever our part of it says: it was
        called well."""
        inner = json.loads(engine(tmp_path / "slab"))
        outer = {"kv_connector": "MultiConnector", ENGINE: {"connectors": [inner]}}
        (text,) = examined(transfer=json.dumps(outer))
        assert "kv_load_failure_policy is 'fail'" in text
        outer["kv_load_failure_policy"] = "recompute"
        assert [] == examined(transfer=json.dumps(outer))

    @pytest.mark.parametrize("name", ["of a volume", "another kind"])
    def test_directory_of_somebody_else_is_found_and_untouched(self, tmp_path, name):
        """R-24: nothing in it changes, not by looking either."""
        make_tree(tmp_path / "theirs", FOREIGN[name])
        before = tree(tmp_path)
        (text,) = examined(transfer=engine(tmp_path / "theirs"))
        assert "store.path" in text
        assert before == tree(tmp_path)

    def test_unstable_hash_seed_is_found(self, tmp_path, monkeypatch):
        """C.5: zero hits over restarts."""
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        options = ("--prefix-caching-hash-algo", "xxhash")
        (text,) = examined(*options, transfer=engine(tmp_path / "slab"))
        assert "random per process" in text
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        assert [] == examined(*options, transfer=engine(tmp_path / "slab"))

    @pytest.mark.parametrize(
        ("version", "options", "tokens", "notes"),
        [
            ("0.32.0+cpu", (), 128, 1),
            ("0.32.0", (), 16, 1),
            ("0.32.0+cpu", ("--block-size", "32"), 32, 0),
        ],
    )
    def test_block_size_that_nobody_says_is_the_engines_and_named(
        self, tmp_path, monkeypatch, version, options, tokens, notes
    ):
        """C.5: sizes stand and fall with it, and so does 'of another layout'."""
        machine = gather_machine()
        of_it = attrs.evolve(machine, packages=machine.packages | {"vllm": version})
        monkeypatch.setattr("ucm.cli.doctor.gather_machine", lambda: of_it)
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        transfer = ("--kv-transfer-config", engine(tmp_path / "slab"))
        arguments = ("--json", "--no-trial", tmp_path, *transfer, *options)
        found = call("doctor", *arguments).json()["findings"]
        texts = {each["check"]: each["text"] for each in found}
        assert f"a block of {tokens} tokens" in texts["capacity"]
        assert notes == ("block size" in texts)

    def test_what_holds_no_block_of_the_model_is_found(self, tmp_path):
        """A queue and tiers that would take nothing are named, each with its remedy."""
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        paths = [str(tmp_path / "a"), str(tmp_path / "b")]
        settings = {
            "store": {"path": str(tmp_path / "slab"), "capacity": "1GiB"},
            "queue": {"nbytes": 4096, "span_bytes": 4096},
            "tiers": [
                {"type": "files", "path": paths[0], "capacity": "8KiB"},
                {"type": "disk", "path": paths, "capacity": "400KiB"},
            ],
        }
        (tmp_path / "ucm.json").write_text(json.dumps(settings))
        arguments = "--no-trial", tmp_path, "--file", tmp_path / "ucm.json"
        found = call("doctor", "--json", *arguments).json()["findings"]
        wrong = [each["text"] for each in found if each["severity"] == "wrong"]
        told = " ".join(wrong)
        for part in (
            "queue.nbytes=4096: it does not hold a block of",
            "tiers.0.capacity=8192: it takes blocks of up to 7.875 KiB",
            "tiers.1.capacity=409600: it takes blocks of up to 4 KiB",
        ):
            assert part in told

    def test_slab_of_another_layout_is_found(self, tmp_path):
        """Its extents hold no block of this model."""
        open_slab(tmp_path / "slab").close()
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        transfer = engine(tmp_path / "slab", capacity=8 * SLOT_BYTES)
        texts = examined(tmp_path, transfer=transfer)
        assert any("another layout" in text for text in texts)

    def test_slab_of_another_release_is_found(self, tmp_path):
        """And told apart from what is none."""
        open_slab(tmp_path / "slab").close()
        manifest = tmp_path / "slab" / "slab.json"
        manifest.write_text(manifest.read_text().replace('"schema":', '"schema":9'))
        (text,) = examined(transfer=engine(tmp_path / "slab"))
        assert "another release made it" in text

    def test_memory_limit_below_the_capacity_is_found(self, tmp_path, monkeypatch):
        """R-26: a container's limit, as Linux tells it."""
        limit = "sys/fs/cgroup/memory"
        files = {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "",
            f"{limit}.max": f"{CAPACITY // 2}\n",
            f"{limit}.current": "0\n",
        }
        monkeypatch.setattr(_creation, "SYSTEM", make_system(tmp_path, files))
        (text,) = examined(transfer=engine("/dev/shm/ucm-doctor"))
        assert "needs 8 MiB more, and 4 MiB are left of the limit" in text

    def test_settings_that_cannot_be_used_end_the_call(self):
        """X-09: they are told as anywhere else."""
        told = call("doctor", "--kv-transfer-config", '{"kv_connector": "Other"}')
        assert 2 == told.code
        assert told.is_tidy()

    @pytest.mark.parametrize("answers", [0, 1])
    def test_mount_that_hangs_is_found_and_not_asked_again(
        self, tmp_path, monkeypatch, answers
    ):
        """X-14: whichever question it does not answer is the last one: no store is tried
        there, and the doctor ends."""
        asked = []

        def hanging(_seconds, ask):
            asked.append(ask)
            return ask() if len(asked) <= answers else None

        monkeypatch.setattr(doctor_module, "within", hanging)
        transfer = engine(tmp_path / "slab")
        told = call("doctor", "--json", "--kv-transfer-config", transfer)
        assert 1 == told.code
        findings = told.json()["findings"]
        assert any("does not answer" in each["text"] for each in findings)
        assert not any("round trip" == each["check"] for each in findings)
        assert answers + 1 == len(asked)

    def test_store_is_tried_where_only_its_own_mount_is_memory(
        self, tmp_path, monkeypatch
    ):
        """X-12: as in a pod with a mount for the slab; nothing is tried beside what is there."""
        path = tmp_path / "mount"
        path.mkdir(0o700)
        monkeypatch.setattr(doctor_module, "is_in_memory", path.__eq__)
        options = ("doctor", "--json", "--kv-transfer-config", engine(path))
        for there, told in ((False, f"blocks in {path}"), (True, "is no memory")):
            if there:
                open_slab(path).close()
            findings = call(*options).json()["findings"]
            (text,) = (e["text"] for e in findings if e["check"] == "round trip")
            assert told in text

    def test_slab_on_a_disk_is_one_finding(self, disk_path):
        """What is wrong is the place, and not the number of slots there."""
        (text,) = examined(transfer=engine(disk_path / "slab"))
        assert "a slab is memory" in text

    def test_backend_that_is_down_is_found(self, tmp_path):
        """A tier can be tried before it is configured; what is not there is wrong, and
        text that is no tier is the caller's."""
        tier = {"type": "disk", "path": str(tmp_path / "missing" / "tier")}
        options = ("--tier", json.dumps(tier))
        (text,) = examined(*options, transfer=engine(tmp_path / "slab"))
        assert "tiers.0 (disk)" in text
        tier = {"type": "disk", "path": str(tmp_path / "tier"), "capacity": "256MiB"}
        options = ("--tier", json.dumps(tier))
        assert [] == examined(*options, transfer=engine(tmp_path / "slab"))
        for text in ("{", "[]", "[" * 9999):
            told = call("doctor", "--no-trial", "--tier", text)
            assert 2 == told.code
            assert told.is_tidy()

    def test_directory_of_two_tiers_is_found_once(self, tmp_path):
        """Each of them alone is well."""
        tier = {"type": "files", "path": str(tmp_path / "t"), "capacity": "256MiB"}
        store = {"path": str(tmp_path / "slab"), "capacity": CAPACITY}
        given = {ENGINE: {"store": store, "tiers": [tier, {**tier, "type": "disk"}]}}
        (text,) = examined(transfer=engine(tmp_path / "slab", **given))
        assert "tiers.0 has it, too Give each one its own." in text
        del tier["capacity"], tier["path"]
        (text,) = examined(transfer=engine(tmp_path / "slab", **given))
        assert "tiers.0.path=" in text

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({ENGINE: {"store": {"type": "slap"}}}, "Registered: ['memory', 'null'"),
            ({ENGINE: {"store": {"type": "memory"}}}, "is not shared"),
            (
                {ENGINE: {"store": {"type": "null"}, "tiers": [{"type": "memory"}]}},
                "only a slab has tiers",
            ),
            (
                {ENGINE: {"store": {"type": "null"}, "kv_events": "node"}},
                "only a slab records its changes",
            ),
            (
                {ENGINE: {"store": {"type": "null"}, "hit_ratio": 0.5}},
                "hit_ratio is 0.5: hits are made up",
            ),
            ({"kv_role": "kv_bth"}, "Use one of ['kv_both'"),
        ],
    )
    def test_what_an_engine_refuses_or_garbles_is_found(self, tmp_path, given, told):
        """Each by its name, and once."""
        (text,) = examined(transfer=engine(tmp_path / "slab", **given))
        assert told in text

    @pytest.mark.parametrize("level", ["info", "off"])
    def test_directory_without_room_for_a_log_is_found(self, tmp_path, level):
        """An engine would not start for it; without a log nobody needs one."""
        (tmp_path / "file").touch()
        log = {"directory": str(tmp_path / "file" / "logs"), "level": level}
        store = {"path": str(tmp_path / "slab"), "capacity": CAPACITY}
        given = {ENGINE: {"store": store, "log": log}}
        texts = examined(transfer=engine(tmp_path / "slab", **given))
        assert [level == "info"] == ["log.directory=" in text for text in texts or [""]]
        assert ["file"] == [each.name for each in tmp_path.iterdir()]

    def test_other_stores_are_not_looked_at(self):
        """There is nothing to look at, and it is said so."""
        extra = {ENGINE: {"store": {"type": "null"}}}
        names = {"kv_connector": "UCMConnector", "kv_role": "kv_both"}
        transfer = {**names, "kv_load_failure_policy": "recompute", **extra}
        assert [] == examined(transfer=json.dumps(transfer))


class TestModel:
    def test_what_the_engines_file_says_need_not_be_said_again(self, tmp_path):
        """C.5: model, ranks and block size are read from what the engine reads, a number in
        quotes as well; the command line counts before it."""
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
        file = tmp_path / "serve.json"
        file.write_text(
            json.dumps(
                {
                    "model": str(tmp_path / "model"),
                    "tensor-parallel-size": 4,
                    "block-size": "32",
                    "kv-transfer-config": json.loads(engine(tmp_path / "slab")),
                }
            )
        )
        for options, told in (
            ((), "32 tokens 4 parts of 1 MiB"),
            (("-tp", "1"), "32 tokens 1 parts of 4 MiB"),
            (("--block-size", "16", "--kv-cache-dtype", "fp8"), "4 parts of 256 KiB"),
        ):
            answer = call(
                *("doctor", "--json", "--no-trial", "--file", file, *options),
                *("--tokens-per-second", "1"),
            )
            texts = [each["text"] for each in answer.json()["findings"]]
            assert any(told in text for text in texts)
            assert any("fill it in" in text for text in texts)

    def test_type_of_the_cache_without_a_size_leaves_all_else_looked_at(self, tmp_path):
        """An engine knows types of which nobody here knows the size: that is no setting that cannot be used."""
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        options = ("--kv-cache-dtype", "int8_per_token_head", "--no-trial")
        transfer = engine(tmp_path / "slab", capacity=1 << 20)
        told = call(
            "doctor", tmp_path, *options, "--kv-transfer-config", transfer, "--json"
        )
        checks = {each["check"]: each for each in told.json()["findings"]}
        assert "int8_per_token_head" in checks["capacity"]["text"]
        assert "note" == checks["capacity"]["severity"]
        assert {"engine", "hashes", "store"} <= checks.keys()

    def test_model_that_cannot_be_read_ends_the_call(self, tmp_path):
        """A name of a hub is not a directory: nothing is downloaded."""
        for options in ((), ("--kv-cache-dtype", "int8_per_token_head")):
            told = call("doctor", tmp_path / "missing", *options)
            assert 3 == told.code
            assert told.is_tidy()

    def test_number_that_is_none_ends_the_call(self, tmp_path):
        """What an engine's file says is checked as well."""
        file = tmp_path / "serve.json"
        transfer = json.loads(engine(tmp_path / "slab"))
        file.write_text(json.dumps({"block-size": "x", "kv-transfer-config": transfer}))
        told = call("doctor", "--file", file)
        assert 2 == told.code
        assert "block-size" in told.err


@pytest.mark.slow
@settings(deadline=None)
@given(
    path=st.text(max_size=12) | st.sampled_from(["/dev/null", "/proc", "/", "", "\0"]),
    capacity=st.sampled_from([1, 4096, "1GiB", 1 << 62, 10**30]),
    told=st.dictionaries(
        st.sampled_from([*LLAMA, "layer_types", "head_dim"]),
        st.integers(-1, 9) | st.text(max_size=4) | st.just(["linear_attention"] * 32),
    ),
)
def test_whatever_is_configured_there_are_findings_or_one_line(
    tmp_path_factory, path, capacity, told
):
    """No path, capacity or model makes a traceback, and none is written to."""
    model = tmp_path_factory.getbasetemp() / "config.json"
    model.write_text(json.dumps({**LLAMA, **told}))
    transfer = engine(path, capacity=capacity)
    found = call("doctor", model, "--no-trial", "--kv-transfer-config", transfer)
    assert found.is_tidy()


@pytest.mark.slow
@settings(deadline=None)
@given(
    said=st.dictionaries(
        st.sampled_from(
            [
                *("model", "tensor-parallel-size", "block_size", "kv-cache-dtype"),
                *("prefix-caching-hash-algo", "kv-transfer-config", "7", "x\x1b"),
            ]
        ),
        st.none() | st.integers(-1, 1 << 70) | st.text(max_size=6) | st.just([1]),
    )
)
def test_whatever_an_engines_file_holds_there_are_findings_or_one_line(
    tmp_path_factory, said
):
    """An engine's file is the engine's: what it holds is not ours to know, YAML's
    numbers for keys neither."""
    base = tmp_path_factory.getbasetemp()
    transfer = json.loads(engine(base / "slab"))
    told = {"kv-transfer-config": transfer, **said}
    lines = [
        f"{key if key == '7' else json.dumps(key)}: {json.dumps(told[key])}"
        for key in told
    ]
    (base / "serve.yaml").write_text("\n".join(lines))
    assert call("doctor", "--no-trial", "--file", base / "serve.yaml").is_tidy()
