#!/usr/bin/env bash
# Makes a folder that checks the trainer on a machine with a GPU: dev/gpu/bundle.sh FOLDER PROFILER PROGRAM...
#
# It holds the programs (in bin/, a name like train_gpt-plain as train_gpt), the libraries they need that a machine with
# CUDA may lack (lib/), what they need of CUDA's by name (cuda-libraries.txt), the scripts where they are in the repository,
# and the commit. FOLDER/gpu_check runs it.
set -euo pipefail
most_megabytes=60

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

# What every such machine has stays there: the C library and the C++ library, which Python's modules share, and the
# driver. CUDA's libraries are large, and come with CUDA or with PyTorch.
of_the_system='(ld-linux[^/]*|libc|libm|libdl|librt|libpthread|libresolv|libutil|libstdc\+\+|libgcc_s|libcuda)\.so'
of_cuda='(libcublasLt|libcublas|libcudart|libcudnn[^/]*|libnccl|libnvrtc|libcupti)\.so'
needed=$(ldd "$@" | awk '/=>/ { print $1, $3 }' | sort -u -k1,1)
if grep -v ' /' <<<"$needed" >&2; then
    echo 'error: these libraries, which the programs need, are not here' >&2
    exit 1
fi
# What a program with a GPU's part opens when it first computes there (llmc/device/cuda/cublaslt_library.cpp), and then what
# it is linked with. A library of CUDA's brings those that it needs itself. (grep finds none in the tests' programs, whose GPU is
# simulated.)
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
# Those that are loaded where they are there: what for, and the package of Python's that has it.
cat >>"$folder/cuda-libraries.txt" <<'END'
libcudnn.so.9 wanted --attention cudnn; nvidia-cudnn-cu13
libnvrtc.so.13 wanted cuDNN, while it runs; nvidia-cuda-nvrtc
END
if [[ -e $profiler ]]; then
    cp "$profiler" "$folder/lib"
    echo 'libcupti.so.13 wanted the time that a step spends outside kernels; nvidia-cuda-cupti' >>"$folder/cuda-libraries.txt"
fi
find "$folder/lib" -name '*.so*' -exec strip --strip-unneeded {} +

cd "$root"
cp --parents dev/gpu/*.py dev/cpu/torch_step.py dev/lab/report.py test/python/{model_bounds,model_comparison}.py \
    test/python/{program,reference_model,safetensors_file}.py "$folder"
cp dev/gpu/gpu_check.sh "$folder/gpu_check"
git describe --always --dirty --exclude='*' >"$folder/commit.txt" 2>/dev/null || echo unknown >"$folder/commit.txt"

megabytes=$(du -sm "$folder" | cut -f1)
echo "$folder: $megabytes MB"
if ((megabytes > most_megabytes)); then
    echo "error: $folder is larger than $most_megabytes MB" >&2
    exit 1
fi
