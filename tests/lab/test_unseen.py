"""The table of unseen jobs: its rows, and how output is parsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.benchmarks import unseen
from lab.benchmarks.unseen import CHOSEN, COLUMNS, RESULTS, Outcome, section_of
from lab.benchmarks.unseen_jobs import FOLDER, Job, clone_commands, losses_of, prepare, read_jobs


def test_every_job_says_where_it_is_from():
    """At least 25 jobs of at least 10 kinds, each with its commit and licence, or written for the table."""
    jobs = read_jobs()
    assert len({job.name for job in jobs}) == len(jobs) >= 25
    assert len({job.kind for job in jobs}) >= 10
    for job in jobs:
        script = job.command.split()[0]
        if job.repository:
            assert len(job.commit) == 40, job.name
            assert job.licence, job.name
        else:
            assert "Written for this table." in (FOLDER / job.folder / script).read_text(encoding="utf-8")
        assert all((FOLDER / "stand_ins" / name).is_dir() for name in job.stand_ins), job.name


def test_what_is_missing_is_said(tmp_path):
    """Without checkouts third-party scripts are skipped with a message; so are those that need a missing package."""
    foreign = Job("a", "kind", ".", "train.py", repository="owner/name", commit="1234")
    assert foreign.lacks(None) == "no checkout of owner/name"
    (tmp_path / "owner+name").mkdir()
    assert foreign.lacks(tmp_path) == ""
    assert (
        Job("b", "kind", "own", "b.py", packages=("no-such-package",)).lacks(None) == "no-such-package is not installed"
    )
    assert clone_commands([foreign], "there") == [
        "git clone -q https://github.com/owner/name there/owner+name && git -C there/owner+name checkout -q 1234"
    ]


def test_a_job_is_prepared_in_a_folder_of_its_own(tmp_path):
    """The checkout is copied without its history, the data are made, and the stand-ins are on the path."""
    checkout = tmp_path / "checkouts" / "owner+name"
    (checkout / ".git").mkdir(parents=True)
    (checkout / "train.py").write_text("import requests; print(requests.__file__)", encoding="utf-8")
    job = Job("a", "kind", ".", "train.py", repository="owner/name", stand_ins=("web",), data=("text words 400",))
    prepared = prepare(job, tmp_path / "checkouts", tmp_path / "jobs")
    assert not (prepared.folder / ".git").exists()
    assert len((prepared.folder / "words" / "train.txt").read_text(encoding="utf-8").split()) == 400
    assert Path(prepared.run().stdout.strip()).parent == FOLDER / "stand_ins" / "web"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss 1.5 time 12.3ms", "loss 1.5 time 9.1ms"),
        ("step 3 (0.25s) loss 2", "step 3 (0.75s) loss 2"),
        ("1%| | 3/9 [00:01<00:02] loss 1\rloss 2", "1%| | 3/9 [00:03<00:04] loss 1\rloss 2"),
    ],
)
def test_times_are_no_losses(one, other):
    """What a job prints is compared without its times."""
    assert losses_of(one) == losses_of(other)
    assert losses_of("loss 1.5") != losses_of("loss 1.6")


def test_the_table_says_what_is_over_and_what_failed():
    """One plan over its budget, or one job that its plan ends, and the bar is not passed."""
    good = Outcome("a", "kind", 60, "precision bf16", 1000, 990, 999, 995, 998, "equal")
    over = Outcome("b", "kind", 60, "precision bf16", 1000, 990, 999, 995, 1001, "equal")
    failed = Outcome("c", "kind", 40, "remat within 1 KiB", 1000, 990, 999, failure="it ended")
    assert section_of([good], []).bar.endswith("1 of 1: passed.")
    section = section_of([good, over, failed], [(Job("d", "kind", ".", "d.py"), "no checkout of owner/name")])
    assert "not b at 60 %; failed: c at 40 %" in section.bar
    assert section.bar.endswith("NOT passed.")
    assert "Not run here: d (no checkout of owner/name)." in section.how
    assert all(len(row) == len(COLUMNS) for row in section.rows)


def test_a_stopped_benchmark_goes_on_where_it_was(tmp_path, monkeypatch):
    """Jobs with outcomes in the folder of results are not run again; the table has them all, in the file's order."""
    first, second, third = [job.name for job in read_jobs() if job.folder == "own" and not job.packages][:3]
    ran = []

    def try_job(job, prepared, folder, shares):
        assert prepared.folder.is_dir()
        ran.append(job.name)
        yield Outcome(job.name, job.kind, 80, "precision bf16", 1000, 990, 999, 995, 998, "equal")

    monkeypatch.setattr(unseen, "try_job", try_job)
    monkeypatch.setenv(RESULTS, str(tmp_path / "results"))
    for turn, chosen in enumerate((third, f"{third},{first}", first)):
        monkeypatch.setenv(CHOSEN, chosen)
        section = unseen.measure(tmp_path / str(turn), quick=False)
    assert ran == [third, first]
    assert [row[0] for row in section.rows] == [first, third]
    assert f"{second} (not measured in this run)" in section.how
