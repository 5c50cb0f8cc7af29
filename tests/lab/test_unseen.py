"""The table of unseen jobs: its rows, and how output is parsed."""

from __future__ import annotations

from lab.benchmarks.unseen_jobs import FOLDER, read_jobs


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
