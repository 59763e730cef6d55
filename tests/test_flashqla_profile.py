# SPDX-License-Identifier: MIT
"""Times of single kernels and their share of the peak, from invented events."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fla_flashqla import bench, cases

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import bench_gated_delta_rule as script  # noqa: E402
import profile_gdr as profile  # noqa: E402
import records  # noqa: E402

H200 = profile.PEAKS["NVIDIA H200"]


def event(name: str, start: int, us: float, device: str = "CUDA", annotation: bool = False) -> Any:
    span = SimpleNamespace(start=start, elapsed_us=lambda: us)
    kind = SimpleNamespace(name=device)
    return SimpleNamespace(
        name=name, time_range=span, device_type=kind, is_user_annotation=annotation
    )


def test_flashqla_profile_sums_kernels() -> None:
    """What runs on the device, per call, in the order of the first launches."""
    events = [
        event("gdr_forward_kernel", 20, 700.0),
        event("gdr_prepare_kernel", 10, 170.0),
        event("cudaLaunchKernel", 1, 5.0, device="CPU"),
        event("a range", 0, 999.0, annotation=True),
        event("gdr_prepare_kernel", 110, 190.0),
        event("gdr_forward_kernel", 120, 500.0),
        event("void at::" + "x" * 100, 130, 3.0),
    ]
    found = bench.kernel_times(events, 2)
    assert list(found.items()) == [
        ("gdr_prepare_kernel", 0.18),
        ("gdr_forward_kernel", 0.6),
        ("at::" + "x" * 76, 0.0015),
    ]
    with pytest.raises(RuntimeError, match="no kernel"):
        bench.kernel_times(events[2:4], 2)


def test_flashqla_profile_reads_torchs_events() -> None:
    """The attributes that are read exist in this release of PyTorch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3) + 1
    events = list(profiler.events())
    assert {event.device_type.name for event in events} == {"CPU"}
    with pytest.raises(RuntimeError, match="no kernel"):
        bench.kernel_times(events, 1)
    assert all(event.time_range.elapsed_us() >= 0 and event.name for event in events)


def row(heads: str, seqs: str, **kernels: float) -> dict[str, Any]:
    return {"heads": heads, "seqs": seqs, "ours": kernels}


def test_flashqla_profile_shares() -> None:
    """Figures of docs/forward.md and docs/backward.md."""
    full = row("16:64", "8192x4", gdr_states_kernel=1.0, gdr_reverse_kernel=1.0, other=1.0)
    full["ours"]["gdr_gradients_kernel"] = 1.0
    shares = profile.shares(full, H200)
    assert list(shares) == ["gdr_states_kernel", "gdr_reverse_kernel", "gdr_gradients_kernel"]
    gigabytes, teraflops = (sum(x) for x in zip(*shares.values(), strict=True))
    assert gigabytes * 4.3 == pytest.approx(9.5, rel=0.03)  # 1 ms each, so GB = share * TB/s
    assert teraflops * 0.78 == pytest.approx(0.9, rel=0.01)
    single = row("32:32", "8192x4", gdr_prepare_kernel=0.1, gdr_forward_kernel=0.28)
    of_bytes = {name: share[0] for name, share in profile.shares(single, H200).items()}
    assert of_bytes == pytest.approx(dict.fromkeys(single["ours"], 1.0), abs=0.04)
    # chunks of each sequence, the last of which may be short
    tails = [profile.shares(row("1:1", s, gdr_forward_kernel=0.001), H200) for s in ("65", "2x64")]
    assert tails[0] == tails[1]


def test_flashqla_profile_knows_our_kernels() -> None:
    """Its names are those of the kernels' sources."""
    folder = Path(bench.__file__).parent / "kernels"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    for name in profile.WORK:
        assert f"def {name}(" in source


def test_flashqla_profile_sets() -> None:
    for name in ("develop", "varlen", "product"):
        parser = script.parser_of(None, profile.SETS, ["ours"])
        wanted = script.plan(parser.parse_args(["--set", name]), profile.SETS)
        assert {case.step for case in wanted} == {"fwd", "bwd"} and len(set(wanted)) == len(wanted)
        assert all(sum(cases.parse_seqs(case.seqs)) <= 32768 for case in wanted)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the command on an invented GPU: exit code and records of the file."""
    environment = {"environment": True, "gpu": "NVIDIA H200"}
    monkeypatch.setattr(records, "environment", lambda argv, _: environment | {"argv": argv})
    monkeypatch.setattr(bench, "load", lambda names: (dict.fromkeys(names), {}))
    monkeypatch.setattr(bench, "works", lambda device: True)
    out = tmp_path / "rows.jsonl"

    def run(*argv: str, stop_at: str = "", gpu: str = "NVIDIA H200") -> tuple[int, list[Any]]:
        environment["gpu"] = gpu

        def fake(provider: Any, case: cases.Case, *_: Any) -> Any:
            if case.seqs == stop_at:
                raise KeyboardInterrupt
            if case.seqs == "7":
                raise ValueError("no such thing")
            assert case.mode == "kernels"
            return {"ms": {"gdr_forward_kernel": 1.0, "other": 0.5}}

        monkeypatch.setattr(bench, "measure", fake)
        code = profile.main([*argv, "--out", str(out)])
        return code, [json.loads(line) for line in out.read_text().splitlines()]

    return run


def test_flashqla_profile_rows(profiled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Kept as they come, with the shares of ours; a failure is a row, too."""
    asked = (
        "--heads",
        "16:64",
        "--seqs",
        "8192x4,7,1x8192",
        "--skip-bwd",
        "--providers",
        "ours,fla",
    )
    code, found = profiled(*asked, "--json", stop_at="1x8192")
    assert code == 130 and [r.get("seqs") for r in found] == [None, "8192x4", "7"]
    assert found[1]["fla"] == found[1]["ours"] == {"gdr_forward_kernel": 1.0, "other": 0.5}
    assert found[1]["share"] == {"gdr_forward_kernel": [0.386, 0.397]}
    assert found[2]["ours"] is None and "share" not in found[2]
    shown = capsys.readouterr()
    assert [json.loads(line) for line in shown.out.splitlines()] == found
    assert "[1/3] fwd 16:64 8192x4: ours 1.5 fla 1.5" in shown.err
    text = "ours          1.0000 ms   39% of bytes   40% of FLOPs"
    assert len([x for x in shown.err.splitlines() if text in x and "gdr_forward_kernel" in x]) == 1
    code, found = profiled(*asked, "--resume")
    assert code == 0 and [r.get("seqs") for r in found[3:]] == [None, "1x8192"]


def test_flashqla_profile_on_another_gpu(profiled: Any) -> None:
    """Both passes, and no share of a peak that nobody measured."""
    _, found = profiled("--heads", "2:2", "--seqs", "8", gpu="NVIDIA H100")
    assert [r["step"] for r in found[1:]] == ["fwd", "bwd"]
    assert all("share" not in r for r in found[1:])
