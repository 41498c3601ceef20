#!/usr/bin/env bash
# Unpack Debian's Python for 64-bit ARM, and install packages for it: wheels/python_arm.sh FOLDER PACKAGE...
#
# Nothing is installed on this machine: apt-get resolves and downloads with a state of its own. Afterwards
#   PYTHONPATH=FOLDER/site qemu-aarch64-static -L FOLDER/root FOLDER/root/usr/bin/python3 ...
set -euo pipefail
folder=$(realpath -m "$1")
shift
mkdir -p "$folder/state/lists/partial" "$folder/cache/archives/partial" "$folder/root"
if [ ! -x "$folder/root/usr/bin/python3" ]; then
  : > "$folder/status"
  options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$folder/state"
    -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder/cache" -o APT::Sandbox::User=root
    -o APT::Install-Recommends=0 -o Debug::NoLocking=1)
  apt-get "${options[@]}" -q update
  apt-get "${options[@]}" -qy --download-only install python3 libstdc++6 libasan8 libubsan1
  for package in "$folder"/cache/archives/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
fi
version=$(cd "$folder/root/usr/bin" && readlink python3 | sed 's/python//')
platforms=()
for glibc in 2_17 2_24 2_26 2_27 2_28; do platforms+=(--platform "manylinux_${glibc}_aarch64"); done
"${PYTHON:-python3}" -m pip install -q --disable-pip-version-check --upgrade --only-binary=:all: "${platforms[@]}" \
  --platform manylinux2014_aarch64 --python-version "$version" --implementation cp --abi "cp${version/./}" --abi abi3 \
  --abi none --target "$folder/site" "$@"
