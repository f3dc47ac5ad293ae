#!/usr/bin/env bash
# Write the Python stubs into DIR (default: libs/common/src) with the pinned generator in .venv-gen.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-libs/common/src}
mkdir -p "$out"
bin=.venv-gen/bin
PATH=$PWD/$bin:$PATH $bin/python -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="$out" --mypy_grpc_out="$out" $(cd protos && find evolving -name '*.proto' | sort)
