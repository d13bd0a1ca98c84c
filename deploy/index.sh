# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced. Lets uv use the package index that pip is configured for: uv reads none of pip's settings.
# No host is named here; whoever set a UV_ variable already keeps it.

# uv_like_pip PYTHON: export what `PYTHON -m pip` is configured with as uv's variables.
uv_like_pip() {
    local settings
    settings=$("$1" - <<'PYTHON'
import ast, shlex, subprocess, sys

listed = subprocess.run(
    [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
).stdout
found = {}
# Lines like global.index-url='...'; later sections win in pip, so does the environment.
order = {"global": 0, "install": 1, ":env:": 2}
for line in listed.splitlines():
    key, _, value = line.partition("=")
    section, _, name = key.rpartition(".")
    try:
        words = " ".join(ast.literal_eval(value).split())
    except (SyntaxError, ValueError):
        continue
    if section in order and order[section] >= found.get(name, (0,))[0]:
        found[name] = (order[section], words)
names = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
}
for name, (_, words) in found.items():
    if name in names:
        print(f"{names[name]} {shlex.quote(words)}")
    elif name == "find-links":
        print(f"UV_FIND_LINKS {shlex.quote(words.replace(' ', ','))}")
PYTHON
    ) || settings=""
    local name value
    while read -r name value; do
        if [[ -n "$name" && -z "${!name:-}" ]]; then eval "export $name=$value"; fi
    done <<<"$settings"
    # pip looks at all indexes together; the locks pin every version, so uv may as well.
    export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
}
