# SPDX-License-Identifier: Apache-2.0
"""Execute the Dockerfile's cpu target without a container engine, in a clean Debian, and serve from it.

As root, with the package debootstrap, a few minutes and 3 GB::

    debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,ca-certificates \
        bookworm /var/tmp/h2o-root
    python tests/deploy/build_in_chroot.py /var/tmp/h2o-root --serve

Every RUN line is run as it stands, under the USER, ENV and WORKDIR that are in force there, with
nothing of the caller's environment; then ENTRYPOINT with CMD, HEALTHCHECK until it succeeds, and one
request. What differs from an image: the base is Debian with Debian's Python 3.11 instead of the
official Python image of the same Debian, and processes and network are not isolated. Not a test of
the suite: it needs root and a package index. ``--bind`` makes a folder of the machine visible, for
pip settings and wheels that are kept locally.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM = ("/proc", "/sys", "/dev", "/dev/shm")


@dataclass
class Container:
    """A root directory and what instructions have set so far."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0:0"
    workdir: str = "/"
    found: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        """``words`` as a command line inside."""
        env = [f"{name}={value}" for name, value in self.env.items()]
        enter = ["chroot", f"--userspec={self.user}", str(self.root), "/usr/bin/env", "-i", *env]
        return [*enter, "/bin/sh", "-c", f'cd "{self.workdir}" && exec "$@"', "sh", *words]

    def run(self, line: str) -> None:
        """RUN."""
        print(f"RUN {line}", flush=True)
        started = time.monotonic()
        subprocess.run(self.command("/bin/sh", "-c", line), check=True)
        print(f"    done in {time.monotonic() - started:.0f} s", flush=True)

    def copy(self, rest: str) -> None:
        """COPY; of folders, what git knows."""
        words = rest.split()
        owner = next((w.partition("=")[2] for w in words if w.startswith("--chown=")), "0:0")
        *sources, to = [word for word in words if not word.startswith("--")]
        base = self.root / self.workdir.lstrip("/")
        uid, gid = map(int, owner.split(":"))
        for source in sources:
            names = subprocess.run(
                ["git", "ls-files", "--cached", "--others", "--exclude-standard", source],
                cwd=ROOT,
                check=True,
                capture_output=True,
                text=True,
            ).stdout.splitlines()
            for name in names:
                inside = to if to.endswith("/") else ""
                target = base / inside / name if inside else base / name.replace(source, to, 1)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
                for made in (target, *target.relative_to(base).parents):
                    os.chown(base / made, uid, gid)

    def set_env(self, rest: str) -> None:
        """ENV."""
        for name, value in re.findall(r"(\w+)=(\S+)", rest):
            # As in an image: a reference to a variable that an earlier ENV has set.
            self.env[name] = re.sub(r"\$(\w+)", lambda m: self.env[m[1]], value)


def instructions(target: str) -> Iterator[tuple[str, str]]:
    """The instructions of one target, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    inside = False
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            inside = rest.endswith(f" AS {target}")
        elif word and inside:
            yield word, " ".join(rest.split())


def build(container: Container, *, again: bool) -> None:
    """Carry out the target; if it was before, only take in what it says."""
    for word, rest in instructions("cpu"):
        if word == "RUN":
            if not again:
                container.run(rest)
        elif word == "COPY":
            if not again:
                container.copy(rest)
        elif word == "ENV":
            container.set_env(rest)
        elif word == "USER":
            container.user = rest
        elif word == "WORKDIR":
            container.workdir = rest
            (container.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        else:
            container.found[word] = rest


def serve(container: Container, extra: list[str]) -> None:
    """ENTRYPOINT and CMD, until HEALTHCHECK succeeds; then one request, then SIGTERM."""
    entrypoint = json.loads(container.found["ENTRYPOINT"])
    arguments = json.loads(container.found["CMD"]) + extra
    check = json.loads(container.found["HEALTHCHECK"].partition(" CMD ")[2])
    print("ENTRYPOINT", *entrypoint, *arguments, flush=True)
    process = subprocess.Popen(container.command(*entrypoint, *arguments))
    try:
        started = time.monotonic()
        while subprocess.run(
            container.command(*check), stderr=subprocess.DEVNULL, check=False
        ).returncode:
            if process.poll() is not None or time.monotonic() - started > 300:
                sys.exit("the server did not come up")
            time.sleep(2)
        print(f"HEALTHCHECK succeeds after {time.monotonic() - started:.0f} s", flush=True)
        body = {"model": "SmolLM2-135M-Instruct", "prompt": [1000] * 600, "max_tokens": 40}
        request = urllib.request.Request(
            "http://127.0.0.1:8000/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            print("kv_cache:", json.load(answer)["kv_cache"], flush=True)
    finally:
        process.send_signal(signal.SIGTERM)
        print("stopped with exit code", process.wait(timeout=60), flush=True)


@contextlib.contextmanager
def mounted(root: Path, folders: list[Path]) -> Iterator[None]:
    """What a container has of the machine, and ``folders``, inside of ``root``."""
    done: list[Path] = []
    try:
        for source in (*map(Path, SYSTEM), *folders):
            target = root / str(source).lstrip("/")
            if source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            subprocess.run(["mount", "--bind", source, target], check=True)
            done.append(target)
        yield
    finally:
        for target in reversed(done):
            subprocess.run(["umount", "--lazy", target], check=False)


def main() -> None:
    """Build, and serve if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--bind", type=Path, action="append", default=[])
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--built", action="store_true", help="an earlier call has built it")
    options, extra = parser.parse_known_args()
    container = Container(options.root.resolve())
    shutil.copy("/etc/resolv.conf", container.root / "etc/resolv.conf")
    with mounted(container.root, options.bind):
        build(container, again=options.built)
        if options.serve:
            serve(container, extra)


if __name__ == "__main__":
    main()
