# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by deploy/quickstart, tests/run and .ci/run: installs what is missing of Debian's packages, where it may,
# and makes .venv what the locks say, once.
#
#   .venv/h2o-made-by-setup   this environment is ours and may be made anew
#   .venv/h2o-base.stamp      what is installed, written after the last step: without it, or with another
#   .venv/h2o-test.stamp      content, the next run repairs the environment
#   .venv/h2o-setup.log       what the installers said
#
# H2O_DEVICE=cpu|cuda   overrides the choice of the build (cuda where nvidia-smi sees a GPU)
# H2O_INSTALL=no        names Debian's packages that are missing, installs none

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
log="$venv/h2o-setup.log"
# shellcheck source=deploy/index.sh
. "$root/deploy/index.sh"

say() { printf 'h2o_vllm: %s\n' "$*" >&2; }
fail() { say "$@" && exit 1; }

# setup_environment [test]: afterwards .venv works, has the test tools if asked for, and is first in PATH.
setup_environment() {
    local want="${1:-base}" device
    # uv leaves it to the first import to compile modules. Where that is forbidden every process compiles them
    # again: vLLM is imported in 25 s instead of 10, and a server is two processes.
    unset PYTHONDONTWRITEBYTECODE
    device=$(device)
    if ! ready "$want" "$device" || [[ -n "$(missing_packages "$device")" ]]; then
        # Two starts at once: the second waits, then finds everything done.
        exec 9>"$root/.venv.lock"
        if command -v flock >/dev/null && ! flock -n 9; then
            say "another setup is running; waiting for it ..."
            flock 9
        fi
        get_packages "$device"
        ready "$want" "$device" || build "$want" "$device"
        exec 9>&-
    fi
    export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
}

device() {
    case "${H2O_DEVICE:-}" in
    cpu | cuda) echo "$H2O_DEVICE" ;;
    "") if nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
    *) fail "H2O_DEVICE must be cpu or cuda, got $H2O_DEVICE" ;;
    esac
}

# What an installation depends on. The path too: scripts in .venv/bin name it.
fingerprint() { # base|test DEVICE
    local files=("$root/pyproject.toml" "$root/deploy/locks/$2.txt" "$root/deploy/setup.sh")
    if [[ "$1" == test ]]; then files+=("$root/deploy/locks/test.txt"); fi
    { echo "$2 $root" && cat "${files[@]}"; } | sha256sum
}

stamped() { # base|test DEVICE
    [[ -x "$venv/bin/python" && "$(cat "$venv/h2o-$1.stamp" 2>/dev/null)" == "$(fingerprint "$1" "$2")" ]]
}

ready() { # base|test DEVICE
    stamped base "$2" && { [[ "$1" == base ]] || stamped test "$2"; }
}

build() { # base|test DEVICE
    local want="$1" device="$2" started=$SECONDS
    if ! stamped base "$device"; then
        new_venv
        step "getting the installer (uv)" "a few seconds" get_uv
        uv_like_pip "$venv/bin/python"
        say "building for $device$([[ "$device" == cpu ]] || echo ": nvidia-smi sees a GPU, or H2O_DEVICE says so")"
        step "installing PyTorch ($device)" "a minute or two" install_torch "$device"
        step "installing vLLM and the rest of deploy/locks/$device.txt" "a minute or two" \
            install -r "$root/deploy/locks/$device.txt"
        # Not in isolation: what builds it is in the lock.
        step "installing h2o_vllm" "a few seconds" install --no-build-isolation --editable "$root"
        step "checking" "half a minute" check "$device"
        fingerprint base "$device" >"$venv/h2o-base.stamp"
    fi
    if [[ "$want" == test ]] && ! stamped test "$device"; then
        # If this is interrupted, what is in .venv is unknown: nothing in it counts until it is done.
        rm -f "$venv"/h2o-*.stamp
        uv_like_pip "$venv/bin/python"
        step "installing the test tools" "a few seconds" install -r "$root/deploy/locks/test.txt"
        fingerprint base "$device" >"$venv/h2o-base.stamp"
        fingerprint test "$device" >"$venv/h2o-test.stamp"
    fi
    say "environment ready in $((SECONDS - started)) s: $venv"
}

# Whether the C++ attention kernels can be had: compiled here, or from a wheel.
has_kernels() {
    local cxx="${CXX:-}" name
    for name in "${cxx%% *}" g++ c++ clang++; do
        if [[ -n "$name" ]] && command -v "$name" >/dev/null; then return 0; fi
    done
    # What a wheel carries; see h2o_vllm/kernels/cpu/build.py.
    [[ -d "$root/h2o_vllm/kernels/cpu/lib" ]]
}

# Debian's packages that are missing: on each line whether the set-up can do without, the name, what it is for.
missing_packages() { # DEVICE
    local python
    if ! python=$(find_python); then
        echo "must $python-venv makes the Python environment"
    fi
    [[ "$1" == cpu ]] || return 0
    # By the loader, which also looks where the user says.
    "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' >/dev/null 2>&1 ||
        echo "must libnuma1 is loaded by vLLM's CPU build"
    [[ "${H2O_CPU_KERNEL:-}" == reference ]] || has_kernels || echo "may g++ compiles the attention kernels"
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' >/dev/null 2>&1 ||
        echo "may $python-dev is what torch.compile builds against"
}

# Installs them, or says why not. Whatever is still missing afterwards and has to be there ends the set-up here:
# vLLM itself says nothing of a missing library until its engine dies.
get_packages() { # DEVICE
    local missing names why
    missing=$(missing_packages "$1")
    [[ -n "$missing" ]] || return 0
    names=$(awk '{ printf "%s%s", sep, $2; sep = " " }' <<<"$missing")
    why=$(awk '{ name = $2; $1 = $2 = ""; printf "%s%s (%s)", sep, name, substr($0, 3); sep = ", " }' <<<"$missing")
    if may_install; then
        say "missing of Debian's packages: $why"
        own_venv
        # shellcheck disable=SC2086
        step "installing $names (H2O_INSTALL=no leaves that to you)" "a minute" apt_install $names
    elif grep -q "^must" <<<"$missing"; then
        fail "missing: $why; as root: apt-get install $names"
    fi
    warn_without_compiler "$1"
}

may_install() {
    case "${H2O_INSTALL:-yes}" in
    yes) command -v apt-get >/dev/null && as_root true 2>/dev/null ;;
    no) return 1 ;;
    *) fail "H2O_INSTALL must be yes or no, got $H2O_INSTALL" ;;
    esac
}

# sudo without a question, and with the proxy, which it would drop.
as_root() {
    local name proxies=()
    if [[ $(id -u) -eq 0 ]]; then
        "$@"
        return
    fi
    for name in http_proxy https_proxy no_proxy; do
        [[ -z "${!name:-}" ]] || proxies+=("$name=${!name}")
    done
    sudo -n env "${proxies[@]}" "$@"
}

apt_install() { # PACKAGE...
    local apt=(env DEBIAN_FRONTEND=noninteractive apt-get --yes -o DPkg::Lock::Timeout=300)
    # The lists may be old, or not there.
    as_root "${apt[@]}" update || echo "apt-get update failed; going on with the lists that are here"
    as_root "${apt[@]}" install --no-install-recommends "$@"
}

# The server's own warning comes minutes later, among much else.
warn_without_compiler() { # DEVICE
    [[ "$1" == cpu && "${H2O_CPU_KERNEL:-}" != reference ]] || return 0
    if has_kernels; then return 0; fi
    say "WARNING: there is no g++, so the attention kernels cannot be compiled and plain PyTorch steps in:"
    say "         attention and evictions take many times as long as with the C++ kernels."
    say "         To avoid that: apt install g++ (Debian, Ubuntu), and start again."
}

# The folder, with the mark that it may be overwritten.
own_venv() {
    if [[ -e "$venv" && ! -e "$venv/h2o-made-by-setup" && -e "$venv/pyvenv.cfg" ]]; then
        fail "$venv was not made by this script; move it away, it would be overwritten"
    fi
    mkdir -p "$venv" && touch "$venv/h2o-made-by-setup"
}

new_venv() {
    local python
    own_venv
    python=$(find_python) || fail "no Python 3.11, 3.12 or 3.13 with the module venv found"
    say "creating $venv with $("$python" --version)"
    # All but the log, which says what Debian's packages were installed.
    find "$venv" -mindepth 1 -maxdepth 1 ! -name 'h2o-setup.log' ! -name h2o-made-by-setup -exec rm -rf {} +
    "$python" -m venv "$venv" || fail "$python -m venv failed, see above"
}

# Prints the Python that makes the environment. Where none can: fails, and prints the one that lacks only a package.
find_python() {
    local python found="" other=python3
    # 3.11 first: it is what the test suite is run with.
    for python in python3.11 python3.12 python3.13 python3; do
        "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            >/dev/null 2>&1 || continue
        found="${found:-$python}"
        if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then echo "$python" && return; fi
    done
    # Ubuntu 22.04: python3 is too old, and python3.11 stands beside it.
    if command -v python3 >/dev/null; then
        for python in python3.13 python3.12 python3.11; do
            if apt-cache show "$python-venv" >/dev/null 2>&1; then other="$python"; fi
        done
    fi
    echo "${found:-$other}"
    return 1
}

get_uv() { "$venv/bin/python" -m pip install "uv>=0.8" || echo "uv is not to be had here; going on with pip"; }

install() {
    if [[ -x "$venv/bin/uv" ]]; then
        "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps "$@"
    else
        "$venv/bin/python" -m pip install --no-deps "$@"
    fi
}

# On its own, because the CPU build is on no plain package index: either pip's settings lead to it, or uv
# knows where PyTorch keeps it. For CUDA without pip's folders of wheels: a torch==2.13.0+cpu in one of them
# satisfies the lock's torch==2.13.0.
install_torch() { # DEVICE
    local torch
    torch=$(grep '^torch==' "$root/deploy/locks/$1.txt")
    if [[ "$1" == cuda ]]; then
        UV_FIND_LINKS="" PIP_FIND_LINKS="" install "$torch"
    else
        install "$torch" || { [[ -x "$venv/bin/uv" ]] && install --torch-backend=cpu "$torch"; }
    fi
}

check() { # DEVICE
    "$venv/bin/python" - "$1" <<'PYTHON'
import sys

import torch

if sys.argv[1] == "cuda" and torch.version.cuda is None:
    sys.exit(f"torch {torch.__version__} is not a CUDA build")
import transformers, vllm  # noqa: E401

print(f"torch {torch.__version__}, transformers {transformers.__version__}, vLLM {vllm.__version__}")
PYTHON
}

# step WHAT HOW_LONG COMMAND...: run it into the log, with a sign of life every 15 s.
step() {
    local what="$1" usual="$2" started=$SECONDS heart status=0
    shift 2
    say "$what (usually $usual) ..."
    # Sleeps of 1 s: what is left of a killed one must not keep a pipe open. It ends with this shell.
    {
        while sleep 1 && kill -0 $$ 2>/dev/null; do
            (((SECONDS - started) % 15)) || say "  ... $((SECONDS - started)) s"
        done
    } 9>&- &
    heart=$!
    "$@" >>"$log" 2>&1 || status=$?
    kill "$heart" 2>/dev/null
    wait "$heart" 2>/dev/null || true
    [[ $status -eq 0 ]] || { tail -n 25 "$log" >&2 && fail "$what failed; all of it is in $log"; }
    say "  done in $((SECONDS - started)) s"
}
