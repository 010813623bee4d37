#!/usr/bin/env bash
# Build the wheel, install it into a clean environment, and run it from an empty folder.
# The argument is the Python that builds the wheel, .venv/bin/python by default.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
builder=${1:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$builder" -m build --wheel --outdir "$work/dist" "$root" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
python=$("$builder" -c 'import sys; print(sys._base_executable)')
"$python" -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check -c "$root/constraints.txt" torch
"$work/env/bin/pip" install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$work"/dist/*.whl
mkdir "$work/empty"
cd "$work/empty"
"$work/env/bin/fedexp" --help >"$work/help.txt"
grep -q 'method' "$work/help.txt"
"$work/env/bin/fedexp" rounds=2 clients=4
test "$(find outputs -name result.json | wc -l)" = 1
test -z "$(find . -maxdepth 1 -mindepth 1 ! -name outputs)"
echo "wheel: installed, helped and ran from an empty folder"
