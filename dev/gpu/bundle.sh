#!/usr/bin/env bash
# Makes a folder that checks the trainer on a machine with a GPU: dev/gpu/bundle.sh FOLDER PROFILER PROGRAM...
#
# The folder holds the programs (in bin/; train_gpt-plain becomes train_gpt) and the libraries that they need
# and that a machine with CUDA may lack (lib/). It also holds the names of the CUDA libraries that they need
# (cuda-libraries.txt), the scripts at the same paths as in the repository, and the commit. FOLDER/gpu_check
# runs it.
set -euo pipefail
# Tests raise it: their programs have a sanitizer, and are larger than those for a GPU.
most_megabytes=${BUNDLE_MEGABYTES:-60}

folder=$(realpath -m "$1")
profiler=$2 # dev/gpu/kernel_times.cpp as a library, if it was built
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib"

for program in "$@"; do
    name=$(basename "$program")
    strip -o "$folder/bin/${name%-*}" "$program"
done

# Libraries that every such machine has are not copied: the C library, the C++ library, which Python's modules
# share, and the driver. Nor are CUDA's libraries, which are large, and come with CUDA or with PyTorch.
of_the_system='(ld-linux[^/]*|libc|libm|libdl|librt|libpthread|libresolv|libutil|libstdc\+\+|libgcc_s|libcuda)\.so'
of_cuda='(libcublasLt|libcublas|libcudart|libcudnn[^/]*|libnccl|libnvrtc|libcupti)\.so'
needed=$(ldd "$@" | awk '/=>/ { print $1, $3 }' | sort -u -k1,1)
if grep -v ' /' <<<"$needed" >&2; then
    echo 'error: these libraries, which the programs need, are not here' >&2
    exit 1
fi
# First the library that a program with a GPU part opens at its first product
# (llmc/device/cuda/cublaslt_library.cpp), then the libraries that it is linked with. A CUDA library brings
# the libraries that it needs. (grep finds none in the tests' programs, which simulate the GPU.)
{
    grep -aohE 'libcublasLt\.so\.[0-9]+' "$@" | sed 's/$/ needed/' || true
    while read -r name path; do
        if [[ $name =~ ^$of_cuda ]]; then
            echo "$name needed"
        elif ! [[ $name =~ ^$of_the_system ]]; then
            cp -L "$path" "$folder/lib"
        fi
    done <<<"$needed"
} | sort -u >"$folder/cuda-libraries.txt"
# Optional libraries, their purposes, and their Python packages.
cat >>"$folder/cuda-libraries.txt" <<'END'
libcudnn.so.9 wanted --attention cudnn; nvidia-cudnn-cu13
libnvrtc.so.13 wanted cuDNN, while it runs; nvidia-cuda-nvrtc
END
if [[ -e $profiler ]]; then
    cp "$profiler" "$folder/lib"
    echo 'libcupti.so.13 wanted the time that a step spends outside kernels; nvidia-cuda-cupti' >>"$folder/cuda-libraries.txt"
fi
find "$folder/lib" -name '*.so*' -exec strip --strip-unneeded {} +
# Large ones travel compressed; gpu_check unpacks them once on each machine.
find "$folder/lib" -name '*.so*' -size +1M -exec gzip -9n {} +

cd "$root"
cp --parents dev/gpu/*.py dev/cpu/torch_step.py dev/lab/report.py test/python/{model_bounds,model_comparison}.py \
    test/python/{program,reference_gpt2,reference_llama,reference_model,safetensors_file}.py "$folder"
cp dev/gpu/gpu_check.sh "$folder/gpu_check"
# Operands and required results of every operation, so that the machine needs neither numpy nor PyTorch.
"${PYTHON:-python3}" test/python/op_files.py "$folder/ops"
git describe --always --dirty --exclude='*' >"$folder/commit.txt" 2>/dev/null || echo unknown >"$folder/commit.txt"

megabytes=$(du -sm "$folder" | cut -f1)
echo "$folder: $megabytes MB"
if ((megabytes > most_megabytes)); then
    echo "error: $folder is larger than $most_megabytes MB" >&2
    exit 1
fi
