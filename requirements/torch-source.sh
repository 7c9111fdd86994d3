# Sourced by setup.sh and pins.sh. Says where uv finds a torch for CPUs: sets `torch_source` (options for uv) and UV_FIND_LINKS.
#
# It is a folder of wheels where one is named (UV_FIND_LINKS or PIP_FIND_LINKS) and holds that torch for this Python ($1, such
# as cp311), and PyTorch's CPU index where not: the wheel that PyPI serves to Linux is the one for CUDA.

# uv takes commas between places, pip takes spaces; uv does not look at what pip is told.
places=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
places=${places// /,}
export UV_FIND_LINKS=$places

torch_version=$(sed -n 's/^torch==\([^ ;+]*\).*/\1/p' "$(dirname "${BASH_SOURCE[0]}")/cpu.in")
torch_source=(--torch-backend cpu)
IFS=, read -r -a folders <<<"$places"
for folder in "${folders[@]}"; do
    if compgen -G "${folder#file://}/torch-$torch_version*-$1-*.whl" >/dev/null; then
        torch_source=()
    fi
done
