"""Checks the pinned dependencies for known vulnerabilities, where an index answers.

    python packaging/audit.py

runs pip-audit on constraints.txt. Exit status 1 if a pinned version has a known vulnerability. Where the index has no
advisories (a mirror, or no network), a sentence says how much was not audited, and the status is 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def main() -> int:
    """Runs pip-audit, prints what it found, and returns the exit status."""
    command = [sys.executable, "-m", "pip_audit", "-r", str(CONSTRAINTS), "--no-deps", "--disable-pip", "-f", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        is_offline = is_unreachable(done.stderr)
        cause = "no index answered" if is_offline else "pip-audit failed"
        print(f"Nothing was audited: {cause} ({reason}).")
        return 0 if is_offline else 1
    text, is_vulnerable = describe(found)
    print(text)
    return int(is_vulnerable)


def is_unreachable(errors: str) -> bool:
    """Whether pip-audit failed because no index answered, not for a reason of its own."""
    return any(name in errors for name in ("ConnectionError", "ServiceError", "Timeout", "ProxyError"))


def describe(found: list[dict[str, Any]]) -> tuple[str, bool]:
    """Returns what pip-audit found in sentences, and whether any pinned version is vulnerable.

    Args:
        found: The entries of ``dependencies`` in its JSON.
    """
    flaws = [
        f"{one['name']} {one['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'no version'}"
        for one in found
        for flaw in one.get("vulns", [])
    ]
    skipped = sorted(one["name"] for one in found if "skip_reason" in one)
    audited = (
        f"{len(found) - len(skipped)} of {len(found)} pinned packages audited, {len(flaws)} known vulnerabilities."
    )
    unknown = [f"Not audited, since the index has no advisories on them: {', '.join(skipped)}."] if skipped else []
    return "\n".join([*flaws, audited, *unknown]), bool(flaws)


if __name__ == "__main__":
    sys.exit(main())
