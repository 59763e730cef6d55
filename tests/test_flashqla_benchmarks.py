# SPDX-License-Identifier: MIT
"""The side-by-side timer with stand-ins on the CPU, its cases, and its files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fla_flashqla
from fla_flashqla import bench, cases, reference

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_gated_delta_rule as script  # noqa: E402
import host_time as host  # noqa: E402
import records  # noqa: E402

ENVIRONMENT = {"environment": True, "gpu": "NVIDIA H200", "time": "2026-01-01T00:00:00Z"}
CASE = cases.Case("1:2", "5+3", "fwd", "published")
LAYER = cases.Case("3:6", "5+70", "fwd", "layer")
REFERENCE = bench.Provider(reference.chunk_gated_delta_rule, flags=True)


def fails(**_: Any) -> Any:
    raise ValueError("no such\n  thing")


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call instead of a CUDA graph, which always takes 1.5 ms."""
    monkeypatch.setitem(bench.TIMERS, "graph", lambda make: (make()(), 1.5)[1])


def measure(providers: dict[str, Any], *wanted: cases.Case, **options: Any) -> list[Any]:
    rows: list[Any] = []
    assert bench.run(list(wanted), providers, rows.append, device="cpu", **options)
    return rows


def plan(*argv: str) -> list[cases.Case]:
    return script.plan(script.arguments(list(argv)))


# Cases


@pytest.mark.parametrize(
    "text, lens",
    [
        ("1x2048", [2048]),
        ("8192x4", [8192] * 4),
        ("4x8192", [8192] * 4),
        ("4096+28672", [4096, 28672]),
        ("2x64+7", [64, 64, 7]),
        ("rand1_8192", [8192]),
        ("rand4_8192", [5809, 1244, 406, 733]),
    ],
)
def test_flashqla_bench_lengths(text: str, lens: list[int]) -> None:
    assert cases.parse_seqs(text) == lens


@pytest.mark.parametrize("text", ["", "x", "8x", "0", "0x8", "2x3x4", "-1", "rand0_8", "rand9_8"])
def test_flashqla_bench_wrong_lengths(text: str) -> None:
    with pytest.raises(ValueError, match=f"got '{text}'"):
        cases.parse_seqs(text)


@pytest.mark.parametrize("text", ["", "8", "2:7", "0:8", "a:b", "2:4:8"])
def test_flashqla_bench_wrong_heads(text: str) -> None:
    with pytest.raises(ValueError, match=f"got '{text}'"):
        cases.parse_heads(text)


def counts(wanted: list[cases.Case]) -> list[int]:
    assert len(set(wanted)) == len(wanted)
    for case in wanted:
        tokens = sum(cases.parse_seqs(case.seqs))
        assert 2048 <= tokens <= 32768 and cases.parse_heads(case.heads)
    return [sum(case.step == step for case in wanted) for step in cases.STEPS]


def test_flashqla_bench_published_set() -> None:
    """Nine head configurations with nineteen length sets; the backward's four with eight."""
    published = plan()
    assert counts(published) == [9 * 19, 4 * 8, 0]
    for step, total in (("fwd", [2048, 4096, 8192, 16384, 32768]), ("bwd", [8192, 32768])):
        lens = [cases.parse_seqs(case.seqs) for case in published if case.step == step]
        assert sorted({sum(x) for x in lens}) == total
    pieces = {(len(x), sum(x)) for x in lens}
    assert pieces == {(n, tokens) for n in (1, 2, 4, 8) for tokens in (8192, 32768)}
    heads = [case.heads for case in published]
    assert heads == sorted(heads, key=list(dict.fromkeys(heads)).index)  # each one's rows together


def test_flashqla_bench_published_set_in_several_runs() -> None:
    """A run for each head configuration takes the set's passes and lengths for it, and all are all."""
    published = plan("--set", "published")
    runs = [plan("--set", "published", "--heads", h) for h in {case.heads for case in published}]
    assert sorted(sum(runs, [])) == sorted(published)
    assert counts(plan("--heads", "16:48")) == [19, 0, 0]
    assert counts(plan("--heads", "16:32")) == [19, 8, 0]
    assert counts(plan("--heads", "2:4")) == [0, 8, 0]
    assert counts(plan("--heads", "16:48", "--pass", "fwd,bwd")) == [19, 8, 0]
    assert counts(plan("--heads", "16:48", "--seqs", "8192x4")) == [1, 1, 0]


def test_flashqla_bench_other_sets() -> None:
    targets = plan("--set", "targets")
    assert counts(targets) == [28, 16, 0]
    assert list(dict.fromkeys(c.heads for c in targets)) == ["2:8", "4:16", "8:32", "16:64"]
    steps = plan("--set", "targets", "--pass", "step")
    assert {case.seqs for case in steps} == set(script._RANDOM)
    assert counts(plan("--set", "heads")) == [12, 0, 0]


def test_flashqla_bench_layer_set() -> None:
    """Its gates and providers are its own, unless others are asked for."""
    assert counts(plan("--set", "layer")) == [12, 12, 0]
    for argv, gates, peers in (
        (["--set", "layer"], "layer", ["precomputed", "fla"]),
        (["--gates", "layer"], "layer", ["precomputed", "fla"]),
        (["--set", "layer", "--gates", "zero"], "zero", ["fla", "flash_qla", "flashinfer"]),
        (["--set", "layer", "--providers", "ours"], "layer", []),
        ([], "published", ["fla", "flash_qla", "flashinfer"]),
    ):
        args = script.arguments(argv)
        assert {case.gates for case in script.plan(args)} == {gates}
        assert args.providers == ["ours", *peers]


def test_flashqla_bench_explicit_cases() -> None:
    assert plan("--heads", "3:6", "--seqs", "64,2x8", "--pass", "fwd,bwd", "--gates", "zero") == [
        cases.Case("3:6", seqs, step, "zero") for step in ("fwd", "bwd") for seqs in ("64", "2x8")
    ]
    assert {case.heads for case in plan("--heads", "3:6")} == {"3:6"}
    assert plan("--heads", "1:1", "--seqs", "8", "--eager")[0].mode == "eager"
    assert plan("--heads", "1:1", "--seqs", "8", "--warm")[0].mode == "warm"


@pytest.mark.parametrize(
    "argv", [["--seqs", "8x"], ["--heads", "2:3"], ["--pass", "forward"], ["--resume"]]
)
def test_flashqla_bench_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        script.arguments(argv)
    assert raised.value.code == 2
    assert re.search(r"got|none of|needs --out", capsys.readouterr().err)


# Providers


@pytest.mark.parametrize("step", cases.STEPS)
def test_flashqla_bench_row(step: str) -> None:
    case = CASE._replace(step=step)
    (row,) = measure({"fla": REFERENCE}, case)
    assert cases.Case.of(row) == case
    assert row == case._asdict() | {"fla": 1.5}


def test_flashqla_bench_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """A provider that fails is null, with the reason, and the others are measured."""
    detached = lambda **x: reference.chunk_gated_delta_rule(  # noqa: E731
        **{k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in x.items()}
    )
    providers = {
        "ours": REFERENCE._replace(answered=lambda: 7),  # the counter stands still
        "fla": bench.Provider(fails),
        "flash_qla": REFERENCE,
        "flashinfer": bench.Provider(detached),
    }
    (row,) = measure(providers, CASE._replace(step="bwd"))
    assert [row[name] for name in providers] == [None, None, 1.5, None]
    assert row["error"] == {
        "ours": "RuntimeError: our kernels did not run: something else answered FLA's operator",
        "fla": "ValueError: no such thing",
        "flashinfer": "RuntimeError: it has no backward",
    }
    shown = capsys.readouterr().err
    assert "[1/1] bwd 1:2 5+3: ours None fla None flash_qla 1.5" in shown
    assert "    fla: ValueError: no such thing\n" in shown


def test_flashqla_bench_counts_ours() -> None:
    calls: list[Any] = []

    def counted(**inputs: Any) -> Any:
        calls.append(None)
        return reference.chunk_gated_delta_rule(**inputs)

    (row,) = measure({"ours": bench.Provider(counted, answered=lambda: len(calls))}, CASE)
    assert row["ours"] == 1.5 and len(calls) == 2


@pytest.mark.fla
def test_flashqla_bench_through_fla() -> None:
    """On the CPU our reference answers FLA's operator, which is not our kernels."""
    providers, skipped = bench.load(["ours", "fla"])
    assert providers.keys() == {"ours", "fla"} and not skipped
    (row,) = measure({"ours": providers["ours"]}, CASE)
    assert row["ours"] is None and "our kernels did not run" in row["error"]["ours"]


@pytest.mark.fla
def test_flashqla_bench_refusal_is_the_error() -> None:
    """Strict, so that what is refused is not timed as FLA's own path."""
    seen: list[Any] = []

    def look(**_: Any) -> Any:
        seen.append(fla_flashqla.env.strict())
        raise fla_flashqla.Unsupported("not yet")

    (row,) = measure({"ours": bench._ours()._replace(operator=look)}, CASE)
    assert row["ours"] is None and row["error"]["ours"] == "Unsupported: not yet"
    assert seen == [True] and not fla_flashqla.env.strict()


def test_flashqla_bench_flashinfer_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows, decay instead of its logarithm, states [N, HV, V, K]: the same numbers."""

    def theirs(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, **rest: Any) -> Any:
        assert q.dim() == k.dim() == v.dim() == 3 and g.dim() == beta.dim() == 2
        q, k, v, g, beta = (x.unsqueeze(0) for x in (q, k, v, g.log(), beta))
        o, ht = reference.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, state_v_first=True, **rest
        )
        return o.squeeze(0), ht

    module = types.ModuleType("flashinfer.gdn_prefill")
    module.chunk_gated_delta_rule = theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", module)
    providers = bench.load(["flashinfer"])[0] | {"fla": REFERENCE}
    (row,) = measure(providers, CASE._replace(heads="2:6"), errors=True)
    for name in providers:
        assert 0 < row["rel_l2"][name]["o"] < 4e-3
        assert 0 < row["rel_l2"][name]["final_state"] < 1e-5


@pytest.mark.parametrize("heads", ["1:2", "3:6"])
def test_flashqla_bench_gradient_errors(heads: str) -> None:
    """Small for the reference in the inputs' dtypes, and that of a wrong gradient shows its name."""

    def wrong(v: Any, **rest: Any) -> Any:
        return reference.chunk_gated_delta_rule(v=v.detach() + 0.5 * (v - v.detach()), **rest)

    providers = {"fla": REFERENCE, "ours": bench.Provider(wrong)}
    (row,) = measure(providers, CASE._replace(heads=heads, step="bwd"), errors=True)
    right, halved = row["rel_l2"]["fla"], row["rel_l2"]["ours"]
    assert right.keys() == halved.keys() == set(bench.DIFFERENTIATED)
    assert all(0 < error < 8e-3 for error in right.values())
    assert halved.pop("v") == pytest.approx(0.5, rel=1e-2)
    assert all(0 < error < 8e-3 for error in halved.values())


# Gates, betas and norms made by the operator, or by FLA's kernels in front of it


def test_flashqla_bench_layer_inputs() -> None:
    """What FLA's layer passes, raw values in q's dtype."""
    inputs = bench.make_inputs(LAYER._replace(dtype="float16"), "cpu")
    assert all(inputs[name].dtype == torch.float16 for name in ("q", "k", "v", "g", "beta"))
    assert inputs["A_log"].shape == inputs["dt_bias"].shape == (6,)
    flags = ("use_gate", "use_beta_sigmoid", "use_qk_l2norm")
    assert all(inputs[f"{flag}_in_kernel"] for flag in flags) and inputs["state_v_first"]
    assert bench.differentiated(inputs) == [*bench.DIFFERENTIATED, "A_log", "dt_bias"]
    assert bench.make_inputs(CASE, "cpu").keys() == set(bench.ARGUMENTS)


def test_flashqla_bench_layer_needs_the_flags() -> None:
    (row,) = measure({"flash_qla": REFERENCE._replace(flags=False)}, LAYER)
    assert row["error"] == {"flash_qla": "RuntimeError: it does not take the flags of FLA's layer"}


@pytest.fixture
def precomputed(monkeypatch: pytest.MonkeyPatch) -> tuple[bench.Provider, list[Any]]:
    """The provider, with PyTorch for FLA's kernels and for ours, and the calls of the operator."""
    import fla.modules.l2norm
    import fla.ops.common.gate
    import fla.ops.gated_delta_rule.gate

    def gate(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
        return -A_log.exp() * torch.nn.functional.softplus(g.float() + dt_bias)

    def sigmoid(x: torch.Tensor, scale: float) -> torch.Tensor:
        return scale * x.float().sigmoid()

    calls: list[Any] = []

    def operator(**inputs: Any) -> Any:
        calls.append(inputs)
        return reference.chunk_gated_delta_rule(**inputs)

    normalize = torch.nn.functional.normalize
    monkeypatch.setattr(fla.modules.l2norm, "l2norm", lambda x: normalize(x.float(), dim=-1).to(x))
    monkeypatch.setattr(fla.ops.common.gate, "fused_beta_sigmoid", sigmoid)
    monkeypatch.setattr(fla.ops.gated_delta_rule.gate, "fused_gdn_gate", gate)
    ours = bench.Provider(operator, {"A": "1"}, answered=lambda: len(calls), flags=True)
    monkeypatch.setattr(bench, "_ours", lambda: ours)
    found, skipped = bench.load(["precomputed"])
    assert not skipped
    return found["precomputed"], calls


@pytest.mark.fla
@pytest.mark.parametrize("step", ["fwd", "bwd"])
def test_flashqla_bench_precomputed(precomputed: Any, step: str) -> None:
    """The same function and gradients as with the flags, by a call without them."""
    provider, calls = precomputed
    case = LAYER._replace(step=step)
    (row,) = measure({"ours": REFERENCE, "precomputed": provider}, case, errors=True)
    assert row["ours"] == row["precomputed"] == 1.5
    results = {"o", "final_state"} if step == "fwd" else {*bench.DIFFERENTIATED, "A_log", "dt_bias"}
    for errors in row["rel_l2"].values():
        assert errors.keys() == results and all(0 < error < 8e-3 for error in errors.values())
    for call in calls:
        assert not any(name.startswith(("use_", "allow_", "A_", "dt_")) for name in call)
        assert call["state_v_first"] and call["g"].dtype == call["beta"].dtype == torch.float32
        assert (call["g"] <= 0).all() and (call["beta"] > 0).all()
    assert provider.variables == {"A": "1"} and provider.answered() == len(calls) > 0


@pytest.mark.fla
def test_flashqla_bench_precomputed_doubles_beta(precomputed: Any) -> None:
    provider, calls = precomputed
    inputs = bench.make_inputs(LAYER, "cpu")
    o, _ = provider.operator(**inputs | {"allow_neg_eigval": True})
    exact, _ = reference.chunk_gated_delta_rule(**inputs | {"allow_neg_eigval": True})
    assert calls[0]["beta"].max() > 1
    assert bench.testing.relative_error(o, exact) < 8e-3


# Files


def test_flashqla_bench_environment() -> None:
    record = records.environment(["--eager"], None)
    assert record.keys() >= {"gpu", "sms", "driver", "cuda", "time", "argv", *cases.VERSIONS}
    assert record["environment"] is True and record["argv"] == ["--eager"]
    assert record["fla-flashqla"] == fla_flashqla.__version__ and record["torch"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["time"])
    assert re.fullmatch(r"None|[0-9a-f]{40}(-dirty)?", str(record["commit"]))
    assert records.environment([], "abc")["commit"] == "abc"
    json.dumps(record)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_flashqla_bench_commit(tmp_path: Path) -> None:
    """The checkout's, unless git does not track the package: then it is an installed copy."""

    def git(*command: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        subprocess.run(["git", "-C", tmp_path, *name, *command], check=True, capture_output=True)

    assert records._commit(tmp_path) is None
    git("init")
    (tmp_path / "__init__.py").write_text("")
    assert records._commit(tmp_path) is None
    git("add", "__init__.py")
    git("commit", "-m", "a")
    assert re.fullmatch("[0-9a-f]{40}", str(records._commit(tmp_path)))
    (tmp_path / "__init__.py").write_text("# changed")
    assert str(records._commit(tmp_path)).endswith("-dirty")


Start = Callable[..., tuple[int, list[Any]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Run the command on an invented GPU; return its exit code and the file's records."""
    environment = dict(ENVIRONMENT)
    monkeypatch.setattr(bench, "works", lambda device: True)
    for name in cases.NAMES:
        monkeypatch.setitem(bench.LOADERS, name, lambda: REFERENCE)
    monkeypatch.setattr(records, "environment", lambda argv, _: environment | {"argv": argv})
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "1")
    out = tmp_path / "made" / "rows.jsonl"
    rows = ["--heads", "1:2", "--seqs", "8,16,24", "--pass", "fwd", "--providers", "ours,fla"]

    def run(*argv: str, stop_at: str = "", **changed: Any) -> tuple[int, list[Any]]:
        environment.update(changed)

        def fake(provider: Any, case: cases.Case, *_: Any) -> Any:
            if case.seqs == stop_at:
                raise KeyboardInterrupt
            return {"ms": 1.5}

        monkeypatch.setattr(bench, "measure", fake)
        code = script.main([*rows, "--out", str(out), *argv])
        return code, [json.loads(line) for line in out.read_text().splitlines()]

    return run


def lengths(found: list[Any]) -> list[str]:
    return ["new" if record.get("environment") else record["seqs"] for record in found]


def test_flashqla_bench_interrupted_run_keeps_its_rows(start: Start, tmp_path: Path) -> None:
    code, found = start(stop_at="24")
    assert code == 130 and lengths(found) == ["new", "8", "16"]
    assert str(tmp_path) not in json.dumps(found) and "rows.jsonl" in found[0]["argv"]
    file = tmp_path / "made" / "rows.jsonl"
    file.write_text(file.read_text()[:-9])  # the last line was not complete
    code, found = start("--resume", time="2026-01-02T00:00:00Z")
    assert code == 0 and lengths(found) == ["new", "8", "new", "16", "24"]
    assert start("--resume") == (0, found)
    assert lengths(start()[1])[5:] == ["new", "8", "16", "24"]


@pytest.mark.parametrize("changed", [{"commit": "another"}, {"gpu": "NVIDIA GB200"}])
def test_flashqla_bench_resume_in_another_environment(start: Start, changed: Any) -> None:
    start()
    assert lengths(start("--resume", **changed)[1])[4:] == ["new", "8", "16", "24"]


def test_flashqla_bench_resume_with_another_provider(start: Start) -> None:
    start("--providers", "fla")
    assert lengths(start("--resume")[1])[4:] == ["new", "8", "16", "24"]


def test_flashqla_bench_skips_what_is_not_installed(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.LOADERS, "fla", bench._flash_qla)
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    code, (environment, *rows) = start()
    assert code == 0 and environment["skipped"]["fla"].startswith("ModuleNotFoundError: ")
    assert all("ours" in row and "fla" not in row for row in rows)
    assert "fla is skipped: ModuleNotFoundError: " in capsys.readouterr().err
    assert start("--providers", "fla")[0] == 1
    assert "no provider is left" in capsys.readouterr().err


def test_flashqla_bench_json(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = start("--json")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found


def test_flashqla_bench_stops_with_the_gpu(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "works", lambda device: False)
    code, found = start()
    assert code == 1 and lengths(found) == ["new", "8"]
    assert "--resume" in capsys.readouterr().err


def test_flashqla_bench_without_a_gpu(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError):
        start(gpu=None)
    assert "PyTorch finds no GPU" in capsys.readouterr().err


def test_flashqla_bench_host_time(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own function has a column, and the profile names where the time goes."""
    prepare = bench.prepare
    monkeypatch.setattr(bench, "prepare", lambda provider, case, _: prepare(provider, case, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host, "CALLS", 2)
    for name in bench.LOADERS:
        monkeypatch.setitem(bench.LOADERS, name, lambda: REFERENCE)
    monkeypatch.setattr(bench, "measure", lambda *_: {"ms": [0.0412, 0.1]})
    assert host.main(["--heads", "1:2", "--seqs", "8", "--profile"]) == 0
    said = capsys.readouterr().err
    assert said.count("own        issued in    41.2 us, complete after    100.0 us") == 2
    for step in ("fwd", "step"):
        for name in ("ours", "own"):
            assert f"{name}, {step} 1:2 8, 2 calls:" in said
    assert "(chunk_gated_delta_rule)" in said


@pytest.mark.parametrize("line, text", [("{", "not a JSON"), ("{}", "before any environment")])
def test_flashqla_bench_damaged_file(line: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=f"x.jsonl:1: .*{text}"):
        list(records.read(tmp_path / "x.jsonl"))
