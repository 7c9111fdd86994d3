#!/usr/bin/env bash
# Resolves cpu.in into cpu.txt. Versions that cpu.txt already holds stay unless cpu.in moves them or an option says otherwise:
#
#   pins.sh UV [--upgrade | --upgrade-package NAME ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
uv=$1
shift
source ./torch-source.sh cp311
fresh=$(mktemp)
trap 'rm -f "$fresh"' EXIT

# Without its line for torch: "2.13.0" would be kept as PyPI's build, which brings CUDA; unnamed, "2.13.0+cpu" is the newest.
sed '/^torch==/d' cpu.txt >"$fresh"
"$uv" pip compile cpu.in --override cpu-overrides.txt --python-version 3.11 "${torch_source[@]}" --quiet \
    --no-annotate --no-header --no-emit-index-url --no-emit-find-links --output-file "$fresh" "$@" >/dev/null
{
    sed -n '/^#/p' cpu.txt
    sed -e '/^#/d' -e '/^--/d' -e 's/^\(torch==[^+]*\)+cpu/\1/' "$fresh"
} >"$fresh.new"
mv "$fresh.new" cpu.txt
