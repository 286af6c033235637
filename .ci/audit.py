"""Audits every pinned dependency: a known vulnerability ends with 1; a service that does not answer, with a line.

Arguments are passed on to pip-audit (``--osv-url``).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PINNED = Path(__file__).parent.parent / "constraints.txt"


def main() -> int:
    """Ask, and print what was found."""
    # Of pip-audit's services this one is asked by name and version alone, whatever index packages are installed from.
    command = [sys.executable, "-m", "pip_audit", "-s", "osv", "-r", PINNED, "--no-deps", "--disable-pip", "-f", "json"]
    done = subprocess.run([*command, "--progress-spinner", "off", *sys.argv[1:]], capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1][:300]
        silent = re.search(r"connect|resolve|time[d ]*out|HTTP|SSL|proxy", reason, re.I)
        print(f"NOT AUDITED: {'the service does not answer' if silent else 'pip-audit fails'} ({reason})")
        return 0 if silent else 1
    audited = [one for one in found if "vulns" in one]
    for one in audited:
        for known in one["vulns"]:
            mended = ", ".join(known["fix_versions"]) or "no version"
            print(f"{one['name']} {one['version']}: {known['id']}, mended in {mended}")
    count = sum(len(one["vulns"]) for one in audited)
    print(f"{len(audited)} of {len(found)} pinned packages audited, {count} known vulnerabilities")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
