# SPDX-License-Identifier: MIT
"""What README.md tells users: commands that parse, bounds and sentences that the code has."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from fla_flashqla import api, backend, bench, call, cli, plan, testing

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_gated_delta_rule as script  # noqa: E402
import profile_gdr as profile  # noqa: E402
import report  # noqa: E402


def behind(marker: str) -> str:
    before, *rest = README.split(f"<!-- {marker} -->\n")
    assert len(rest) == 1, f"README.md must have one place marked {marker}"
    return rest[0]


def commands(marker: str) -> list[list[str]]:
    block = behind(marker).split("```")[1].splitlines()[1:]
    return [shlex.split(line) for line in block]


def test_flashqla_readme_bench_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for both passes of two shapes."""
    asked: list[str] = []
    monkeypatch.setattr(bench, "compare", lambda wanted, record: asked.extend(map(str, wanted)))
    ((program, *argv),) = commands("bench command")
    assert program == ".venv/bin/fla-flashqla" and cli.main(argv) == 1
    assert len(asked) == 4 and all("heads='16:32'" in case for case in asked)


def test_flashqla_readme_measure_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script takes its arguments; files lie where the report looks for them."""
    seen = []
    monkeypatch.setattr(script, "measure", lambda args, wanted, *_: seen.append((args, wanted)))
    install, *scripts = commands("measure commands")
    assert install == [".venv/bin/pip", "install", ".[bench]"]
    mains = {"bench_gated_delta_rule": script.main, "profile_gdr": profile.main}
    for python, path, *argv in scripts[:-1]:
        assert python == ".venv/bin/python" and (ROOT / path).is_file()
        mains[Path(path).stem](argv)
    assert scripts[-1][1:] == ["benchmarks/report.py"]
    published, host, kernels = seen
    assert len(published[1]) == 19 and {case.mode for case in published[1]} == {"graph"}
    assert {case.mode for case in host[1]} == {"eager"} and len(host[1]) == 11
    assert {case.mode for case in kernels[1]} == {"kernels"}
    assert {args.out.parent.name for args, _ in seen} == {report.slug("NVIDIA H200")}


def test_flashqla_readme_bounds() -> None:
    rows = [line.strip("| ").split(" | ") for line in behind("error bounds").splitlines()[:4]]
    dtypes, _, forward, gradients = rows
    for (name, *bounds), want in (
        (forward, testing.BOUNDS),
        (gradients, testing.GRADIENT_BOUNDS),
    ):
        assert dict(zip(dtypes, map(float, bounds), strict=True)) == want, name


def test_flashqla_readme_sentences() -> None:
    """Texts that it quotes are those that users see."""

    class DTensor(torch.Tensor):
        pass

    x = torch.zeros(1, 1, 1, 128)
    answer = plan.plan(call.describe(x.as_subclass(DTensor), x, x, x[..., 0], x[..., 0]))
    assert isinstance(answer, plan.Refusal) and f"(`{answer.reason}`)" in README
    sources = "".join(Path(str(module.__file__)).read_text() for module in (api, backend))
    quoted = re.findall(
        r"^\| .*`([a-z][a-zA-Z ]{12,})[`:]", README.split("## Troubleshooting")[1], re.M
    )
    assert len(quoted) == 2 and all(text.rstrip(": .") in sources for text in quoted)


def test_flashqla_readme_links() -> None:
    """Files exist, and anchors are headings."""
    titles = re.findall(r"^#+ (.+)$", README, re.M)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("https://"):
            assert (ROOT / target).is_file(), target
