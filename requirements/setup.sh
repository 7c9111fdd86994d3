#!/usr/bin/env bash
# Makes or mends the environment that cpu.txt pins. `make setup` calls it when something has changed; it may be interrupted
# and run again.
#
#   setup.sh PYTHON VENV UV_VERSION PACKAGE...
set -euo pipefail
python=$1 venv=$2 uv_version=$3
shift 3
here=$(dirname "${BASH_SOURCE[0]}")

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

tag_of() { "$1" -c 'import sys; print("cp%d%d" % sys.version_info[:2])'; }

# A Python that the wheels exist for: one on PATH, else one that uv has or can download. Prints nothing where there is none.
other_python() {
    local found uv=
    for found in python3.12 python3.11; do
        if tag_of "$found" >/dev/null; then command -v "$found" && return; fi # on PATH there may be a shim of none
    done
    uv=$(command -v uv) || { "$python" -m venv "$venv" && "$venv/bin/python" -m pip install -q "uv==$uv_version" && uv=$venv/bin/uv; }
    "$uv" python install --quiet 3.12 && "$uv" python find --no-project 3.12
}

command -v "$python" >/dev/null || fail \
    "make setup: no '$python' was found on PATH." \
    "Python 3.11 or 3.12 is needed. Next step: install one, then  make setup PYTHON=python3.12"
tag=$(tag_of "$python")
case $tag in
cp311 | cp312) ;;
*)
    version=$("$python" --version 2>&1)
    found=
    if [ "$python" = python3 ]; then # the default: its version was not the user's choice
        found=$(other_python 2>/dev/null || true)
    fi
    [ -n "$found" ] || fail \
        "make setup: '$python' is $version; Python 3.11 or 3.12 is needed." \
        "(Older ones lack what the core uses; newer ones have no ready-made wheels of megatron-core or outlines-core.)" \
        "Next step: install one, then  make setup PYTHON=python3.12"
    echo "make setup: python3 is $version; using $found, because Python 3.11 or 3.12 is needed."
    python=$found
    tag=$(tag_of "$python")
    ;;
esac

# An environment of another Python, or from another place (console scripts carry their path), cannot be mended: it is made anew.
usable() { [ "$(tag_of "$venv/bin/python" 2>/dev/null)" = "$tag" ] && [ "$(cat "$venv/.place" 2>/dev/null || pwd)" = "$PWD" ]; }
make_venv() {
    "$python" -m venv "$@" "$venv" || fail \
        "make setup: '$python -m venv' failed." "Next step: on Debian or Ubuntu, apt install python3-venv"
}
if ! usable; then
    make_venv --clear
elif ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    make_venv
fi
printf '%s\n' "$PWD" >"$venv/.place"

uv=$venv/bin/uv
if ! [ -x "$uv" ]; then
    uv=$(command -v uv || true)
fi
if [ -z "$uv" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
    uv=$venv/bin/uv
fi

source "$here/torch-source.sh" "$tag"

"$uv" pip install --python "$venv/bin/python" --no-deps "${torch_source[@]}" -r "$here/cpu.txt"

# Byte code, whatever PYTHONDONTWRITEBYTECODE says: without it an SGLang server takes twice as long to start. A step of its own,
# because an installer that finds everything in place compiles nothing. What the built-in demo does not import is left out
# where it is large: tests, packages that trainer and engines do not use, and Megatron, which is compiled below as its
# processes on a CPU compile it. Templates that are no Python fail to compile: no matter.
unused='/tests?/|/(pip|anthropic|networkx|numba|Cryptodome|mypy|mypyc|pygments/lexers|pandas|fontTools|datasets|hypothesis|jedi'
unused+='|latex2sympy2_extended|google|openai/resources|sglang/(multimodal_gen|srt/models|kernels/ops)|transformers/models'
unused+='|torch/(testing|_inductor|_vendor)|torchgen|ray/(rllib|data|serve|tune|train|llm|dashboard|autoscaler)'
unused+='|sympy/(physics|combinatorics|parsing)|scipy/(stats|signal|integrate|interpolate)|megatron|mbridge|numpy/distutils'
unused+='|prompt_toolkit|parso|pexpect|pyasn1|pyasn1_modules|werkzeug|virtualenv|typer|lark|antlr4|tomlkit|smg_grpc_\w+|blobfile'
unused+='|cffi|pycparser|llvmlite|multiprocess|smart_open|outlines|markdown_it|distlib|huggingface_hub/(cli|inference)'
unused+='|fsspec/implementations|opentelemetry/semconv|sympy/(stats|polys/benchmarks|vector|categories|testing|diffgeom))/'
"$venv/bin/python" -m compileall -qq -j 0 -x "$unused" "$venv/lib" &
compiling=$! # at the same time as the steps below

# Editable, with the build backend that cpu.txt has just installed.
editable=()
for package in "$@"; do
    editable+=(-e "$package")
done
"$uv" pip install --python "$venv/bin/python" --no-deps --no-build-isolation "${editable[@]}"

# The same for these packages, and for Megatron-core as its processes on a CPU compile it.
"$venv/bin/python" -m compileall -qq slime_core plugins || true
PYTHONDONTWRITEBYTECODE='' "$venv/bin/python" -W ignore -c '
from slime_core.modeling import prepare_megatron
prepare_megatron()
import mbridge, megatron.core.dist_checkpointing, megatron.core.distributed, megatron.core.optimizer, megatron.core.pipeline_parallel
' 2>/dev/null || true
wait "$compiling" || true
