#!/usr/bin/env bash
# Finds missing system packages that the project needs, and installs them on Debian and Ubuntu.
#
#   scripts/deps.sh            lists and installs the packages for building, testing and plotting
#   scripts/deps.sh train      only the packages for building, training and plotting the loss
#   scripts/deps.sh lint       all Debian packages, with the tools of `make lint`, and clang-tidy from PyPI
#   scripts/deps.sh clang-tidy prints the path of the clang-tidy that `lint` installs
#   scripts/deps.sh missing    prints on one line the packages that the build lacks; nothing if it lacks none
#   scripts/deps.sh openmp     prints the folder of the LLVM whose OpenMP CXX is to use, if CXX is a clang++ without its own
#   scripts/deps.sh python     prints the python3 to use: the first that has the modules below
#   scripts/deps.sh gpu        installs the headers of cuDNN's frontend from PyPI, for building with cuDNN; with a second
#                              argument `optional`, a failure is only a warning
#   scripts/deps.sh cuda       prints the folder of CUDA's headers: a toolkit's (CUDA_HOME, if nvcc is there, or where
#                              PATH finds it, or /usr/local/cuda), or else PyPI's in .cuda/
#
# With MPI=0 in the environment MPI is not needed. If CXX is a clang++, that compiler and its OpenMP are needed too.
#
# On other systems it prints the Debian names of missing packages, and exits with 1 if there are any.
set -euo pipefail

without=
[[ ${MPI-} != 0 ]] || without=openmpi

# The compiler in CXX, if it is a clang++: its package, its command, and the package of its OpenMP.
clang=
for word in ${CXX-}; do [[ $word != *clang* ]] || clang=$word; done

# Group, Debian package, and a test for the feature on other systems: for a library, what links it and a header. "debian"
# marks packages that only a system with apt needs. For example, Debian's PyTorch computes with the installed BLAS, and the
# default BLAS is 30 times slower.
needed() {
    [[ ! $clang ]] || printf 'build %s\n' "clang command:$clang" 'libomp-dev openmp:omp.h'
    grep -v "${without:-^$}" <<'END'
build g++                  command:g++
build pkg-config           command:pkg-config
build libcli11-dev         header:CLI/CLI.hpp
build libdnnl-dev          library:-ldnnl oneapi/dnnl/dnnl.h
build libfmt-dev           pkg-config:fmt fmt/core.h
build libopenmpi-dev       pkg-config:ompi-c mpi.h
build librandom123-dev     header:Random123/philox.h
build libtomlplusplus-dev  pkg-config:tomlplusplus toml++/toml.h
build libutf8proc-dev      pkg-config:libutf8proc utf8proc.h
build libxxhash-dev        pkg-config:libxxhash xxhash.h
build libyaml-cpp-dev      pkg-config:yaml-cpp yaml-cpp/yaml.h
build nlohmann-json3-dev   header:nlohmann/json.hpp
run   openmpi-bin          command:ompi_info
run   python-is-python3    command:python
run   python3-matplotlib   python:matplotlib
run   python3-numpy        python:numpy
test  python3-jinja2       python:jinja2
test  python3-requests     python:requests
test  python3-tqdm         python:tqdm
test  python3-xxhash       python:xxhash
test  python3-protobuf     python:google.protobuf
test  python3-rich         python:rich
test  libboost-context-dev library:-lboost_context boost/context/fiber.hpp
test  libgtest-dev         library:-lgtest_main,-lgtest gtest/gtest.h
test  libopenblas0-pthread debian
test  python3-pytest       python:pytest
test  python3-torch        python:torch
pip   python3-pip          debian
style clang-format-14      command:clang-format-14
style python3-pyflakes     python:pyflakes
style shellcheck           command:shellcheck
END
}

has_apt() { command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; }

# test/python/test_lint.py needs the tools of Debian 12. On other systems it skips tools that are not installed.
is_debian_12() { grep -qsx 'ID=debian' /etc/os-release && grep -qsx 'VERSION_ID="12"' /etc/os-release; }

# Exit status 0 if the interpreter $1 can import the modules $2...
imports() {
    "$1" - "${@:2}" 2>/dev/null <<'END'
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(name) for name in sys.argv[1:]))
END
}

# Only /usr/bin/python3 sees Debian's Python modules, and another python3 may come first in PATH. After `make
# quickstart` there may be an interpreter for plots only.
choose_python() {
    local all=(torch numpy pytest matplotlib pyflakes rich google.protobuf requests tqdm xxhash jinja2) plots=(numpy matplotlib)
    if imports python3 "${all[@]}" || { imports python3 "${plots[@]}" && ! imports /usr/bin/python3 "${plots[@]}"; }; then
        command -v python3
    else
        echo /usr/bin/python3
    fi
}

# CUDA's compiler and headers, for the tests of the kernels: from a toolkit, or these packages in .cuda/.
cuda_from_pypi=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85)
choose_cuda() {
    local nvcc
    if [[ ${CUDA_HOME-} && -x $CUDA_HOME/bin/nvcc ]]; then
        echo "$CUDA_HOME"
        return
    fi
    nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) || true
    if [[ $nvcc ]]; then dirname "$(dirname "$(readlink -f "$nvcc")")"; else echo .cuda/nvidia/cu13; fi
}
# CUDA's headers include nv/target, from the package nvidia-cuda-cccl.
has_cuda() { [[ -x $(choose_cuda)/bin/nvcc && -e $(choose_cuda)/include/nv/target ]]; }
# Python modules that Debian lacks, for scripts/tensorboard.py and for data/. This pyarrow is the newest that works with
# Debian 12's NumPy. The scripts also search .python/ (scripts/interpreter.py).
python_from_pypi=(tensorboardX==2.6.4 tokenizers==0.23.3 gguf==0.19.0 pyarrow==25.0.1)
lacking_python() {
    local package
    for package in "${python_from_pypi[@]}"; do
        [[ -e .python/${package%%==*} ]] || imports "$(choose_python)" "${package%%==*}" || echo "$package"
    done
}
has_bpe() { [[ -e data/gpt2_bpe/encoder.json && -e data/gpt2_bpe/vocab.bpe ]]; }
# Asks the interpreter that will import the modules.
has_pip() { "$(choose_python)" -m pip --version >/dev/null 2>&1; }

# Installs PyPI's packages $2... into the top folder of the path $1, unless the file $1 exists. Versions are
# pinned, and no dependencies are installed.
install_from_pypi() {
    local file=$1 folder=${1%%/*}
    shift
    [[ -e $file ]] && return
    echo "deps: installing from PyPI into $folder/: $*"
    if ! "$(choose_python)" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --upgrade \
        --target "$folder" "$@" || ! [[ -e $file ]]; then
        echo "error: could not install from PyPI: $*" >&2
        exit 1
    fi
    echo 'deps: installed'
}

# The versions of Debian 12 also search the headers of the system for faults, and so take three times as long.
clang_tidy=.python/clang_tidy/data/bin/clang-tidy

# Whether the compiler has OpenMP of its own LLVM version; and the newest LLVM folder that has OpenMP.
has_own_openmp() { printf '#include <omp.h>\nint main() {}\n' | "$clang" -fopenmp -x c++ - -o /dev/null 2>/dev/null; }
other_openmp() {
    local library
    library=$(compgen -G '/usr/lib/llvm-*/lib/libomp.so' | sort -V | tail -n 1) && echo "${library%/lib/*}"
}

# Compiles and links a program with the header $1 and the flags $2..., as the build does, which uses only the C interface of
# MPI. A header may be there without its library: Debian has some of Boost's in another package.
links() {
    # shellcheck disable=SC2086  # CXX, CXXFLAGS and LDFLAGS have several words
    printf '#include <%s>\nint main() {}\n' "$1" |
        ${CXX:-g++} -std=c++20 -DOMPI_SKIP_MPICXX ${CXXFLAGS-} -x c++ - -x none ${LDFLAGS-} "${@:2}" -o /dev/null 2>/dev/null
}

# Exit status 0 if the system has the feature.
found() {
    local what=${1#*:} flags
    local header=${what##* }
    what=${what%% *}
    # shellcheck disable=SC2086  # several flags
    case $1 in
        command:*) command -v "$what" >/dev/null ;;
        header:*) links "$header" ;;
        library:*) links "$header" ${what//,/ } ;;
        pkg-config:*) flags=$(pkg-config --cflags --libs "$what" 2>/dev/null) && links "$header" $flags ;;
        python:*) imports "$(choose_python)" "$what" ;;
        openmp:*) has_own_openmp || [[ $(other_openmp) ]] ;;
        debian) ! has_apt ;;
    esac
}

# Prints a line "package probe" for each missing package of the groups $1 (a regular expression). A package counts as
# present if dpkg has it, or if its probe finds it.
missing() {
    local installed='' group package probe
    if has_apt; then
        # shellcheck disable=SC2046  # one argument per package
        installed=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' $(needed | awk '{print $2}') \
            2>/dev/null | sed -n 's/ installed$//p') || true
    fi
    while read -r group package probe; do
        [[ $group =~ ^($1)$ ]] || continue
        grep -qxF "$package" <<<"$installed" || found "$probe" || echo "$package $probe"
    done < <(needed)
}

install_missing() {
    local packages command
    mapfile -t packages < <(missing "$1" | cut -d' ' -f1)
    if ((${#packages[@]} == 0)); then
        echo 'deps: everything needed is installed'
        return
    fi
    if ! has_apt; then
        echo "error: missing: ${packages[*]} (Debian's names); install your system's packages for these" >&2
        exit 1
    fi
    command="apt-get install -y --no-install-recommends ${packages[*]}"
    echo "deps: installing with apt, with their dependencies: ${packages[*]}"
    local as_root=()
    if ((EUID != 0)); then
        command -v sudo >/dev/null || {
            echo "error: neither root nor sudo; ask the administrator to run: $command" >&2
            exit 1
        }
        as_root=(sudo)
    fi
    # Apt's hundreds of lines go to a log, which is shown only on failure. Only the lines with the sizes of
    # the download and of the installation are shown.
    local log
    log=$(mktemp)
    {
        "${as_root[@]}" apt-get update -q &&
            "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
                --no-install-recommends -o Dpkg::Use-Pty=0 "${packages[@]}"
    } 2>&1 </dev/null | tee "$log" | sed -un 's/^\(Need to get\|After this operation\)/deps: \1/p' || {
        tail -n 20 "$log" >&2
        echo "error: apt failed (its log: $log); the command was: $command" >&2
        exit 1
    }
    rm -f "$log"
    echo "deps: installed"
}

case ${1-} in
    train) install_missing 'build|run' ;;
    '')
        install_missing "build|run|test$(is_debian_12 && echo '|style')$( { has_cuda && [[ ! $(lacking_python) ]] && has_bpe; } || has_pip || echo '|pip')"
        has_cuda || install_from_pypi .cuda/nvidia/cu13/include/nv/target "${cuda_from_pypi[@]}"
        mapfile -t lacking < <(lacking_python)
        ((${#lacking[@]} == 0)) || install_from_pypi ".python/${lacking[0]%%==*}" "${lacking[@]}"
        has_bpe || {
            echo "deps: making GPT-2's encoder.json and vocab.bpe in data/gpt2_bpe from PyPI's mlx-whisper"
            "$(choose_python)" data/bpe_files.py >/dev/null
        }
        ;;
    lint)
        install_missing 'build|run|test|style|pip'
        install_from_pypi "$clang_tidy" clang-tidy==23.1.4
        ;;
    clang-tidy) echo "$clang_tidy" ;;
    missing) missing build | sed -E 's/^(\S+) [a-z-]+:(\S+).*/\1 (\2)/; s/^(\S+) \(\1\)$/\1/' | paste -sd, | sed 's/,/, /g' ;;
    openmp) [[ ! $clang ]] || has_own_openmp || other_openmp ;;
    python) choose_python ;;
    gpu)
        frontend=(.cuda/include/cudnn_frontend.h nvidia-cudnn-frontend==1.14.1)
        if [[ ${2-} == optional ]]; then
            (install_from_pypi "${frontend[@]}") 2>/dev/null ||
                echo "warning: PyPI's ${frontend[1]} could not be installed; continuing without cuDNN (\`make deps-gpu\` says why)" >&2
        else
            install_from_pypi "${frontend[@]}"
        fi
        ;;
    cuda) choose_cuda ;;
    *)
        sed -n '2,17s/^# \{0,1\}//p' "$0" >&2
        exit 1
        ;;
esac
