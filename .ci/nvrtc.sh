# Sourced by run and soak: installs NVRTC into target/tools, and lets the tests find and require it. It needs no GPU.
tools=${CARGO_TARGET_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/target}/tools
if ! ls "$tools"/nvrtc/nvidia/*/lib/libnvrtc.so.13 >/dev/null 2>&1; then
  python3 -m pip install --quiet --disable-pip-version-check --target "$tools/nvrtc" nvidia-cuda-nvrtc==13.0.88
fi
# As a whole path: cargo runs each test in the folder of its package.
LD_LIBRARY_PATH=$(cd "$(dirname "$(ls "$tools"/nvrtc/nvidia/*/lib/libnvrtc.so.13)")" && pwd)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH PERILUNE_TEST_NVRTC=1
