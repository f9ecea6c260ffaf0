#!/bin/sh
# Runs NVIDIA's genai-perf against the `generate` model of a running server.
#
#   tests/load/genai_perf.sh 127.0.0.1:8001 vllm .cache/demo-checkpoint --concurrency 2 --request-count 20
#
# Arguments: the server's gRPC address, whose tensors to send (vllm or tensorrtllm), a folder with a tokenizer, and
# further flags of `genai-perf profile`. The first call installs genai-perf into .cache/genai-perf: it wants other
# packages than this project. Results lie in .cache/genai-perf/artifacts.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
home=$root/.cache/genai-perf
address=$1 dialect=$2 tokenizer=$3
shift 3

install() {
    python=$root/.venv/bin/python
    "$python" -m venv "$home/venv"
    "$home/venv/bin/pip" install --quiet genai-perf==0.0.16

    # The package perf-analyzer brings no program; that of the server's version is in the wheel of its client.
    "$home/venv/bin/pip" download --quiet --no-deps --only-binary=:all: --platform manylinux1_x86_64 \
        --dest "$home/wheel" tritonclient==2.51.0
    mkdir -p "$home/bin" "$home/lib"
    "$python" - "$home" <<'PYTHON'
import pathlib, sys, zipfile
home = pathlib.Path(sys.argv[1])
(wheel,) = (home / "wheel").glob("*.whl")
program = home / "bin" / "perf_analyzer"
program.write_bytes(zipfile.ZipFile(wheel).read("tritonclient-2.51.0.data/data/bin/perf_analyzer"))
program.chmod(0o755)
PYTHON

    # It wants two libraries that come with the server.
    libraries=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/nvidia_pytriton.libs
    ln -sf "$libraries"/libb64-*.so.0d "$home/lib/libb64.so.0d"
    ln -sf "$libraries"/libcudart-*.so.12.* "$home/lib/libcudart.so.12"
    touch "$home/installed"
}

[ -e "$home/installed" ] || install

HF_HUB_OFFLINE=1 LD_LIBRARY_PATH=$home/lib PATH=$home/bin:$home/venv/bin:$PATH \
    exec genai-perf profile -m generate --endpoint-type kserve --backend "$dialect" --streaming -u "$address" \
    --tokenizer "$tokenizer" --artifact-dir "$home/artifacts" "$@"
