#!/usr/bin/env bash
# Checks and times the trainer on this machine's GPU: the launcher of a bundle (dev/gpu/bundle.sh).
#
#   gpu_check [first|kernels|model|bench|lab] [OPTION...]   some parts, or all; `gpu_check --help` lists the options
#   gpu_check run PROGRAM [ARGUMENT...]               runs a program of bin/, such as train_gpt, with CUDA's libraries
#
# It looks for CUDA's libraries in CUDA_HOME, among the system's, in /usr/local/cuda, and in the packages of
# python3 in PATH, or of PYTHON (those that come with PyTorch). It names each missing library. The check
# continues without optional ones.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

python=${PYTHON:-python3}
command -v "$python" >/dev/null || {
    echo "error: no $python in PATH" >&2
    exit 1
}

# A wrong program name is reported before missing libraries, like every wrong argument.
if [[ ${1-} == run && ! (${2-} && -f $here/bin/$2) ]]; then
    wrong="there is no program ${2-}"
    [[ ${2-} ]] || wrong="run takes a program"
    there=$(cd "$here/bin" && printf ', %s' *)
    echo "error: $wrong; there are ${there#, }" >&2
    exit 2
fi

# Prints folders that may hold CUDA's libraries, the preferred first.
folders() {
    [[ ! ${CUDA_HOME-} ]] || printf '%s\n' "$CUDA_HOME"/lib64 "$CUDA_HOME"/lib
    tr : '\n' <<<"${LD_LIBRARY_PATH-}"
    { ldconfig -p || /sbin/ldconfig -p || true; } 2>/dev/null | awk '/=>/ { sub("/[^/]*$", "", $NF); print $NF }' | sort -u
    printf '%s\n' /usr/local/cuda/lib64 /usr/local/cuda/lib
    "$python" - <<'END'
import glob, importlib.util
nvidia = importlib.util.find_spec("nvidia")
for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
    print(*sorted(glob.glob(glob.escape(folder) + "/*/lib")), sep="\n")
END
}

# Prints the folder with the libraries that the bundle has compressed (dev/gpu/bundle.sh); unpacks them if it is not there.
unpacked() {
    "$python" - "$here/lib" <<'END'
import gzip, os, pathlib, shutil, sys, tempfile, zlib
libraries = sorted(pathlib.Path(sys.argv[1]).glob("*.gz"))
checksum = zlib.crc32(b"".join(library.read_bytes() for library in libraries))
folder = pathlib.Path(tempfile.gettempdir(), f"gpu_check-{os.getuid()}-{checksum:08x}")
if not folder.is_dir() or folder.stat().st_uid != os.getuid():
    new = pathlib.Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    for library in libraries:
        with gzip.open(library) as packed, open(new / library.stem, "wb") as whole:
            shutil.copyfileobj(packed, whole)
    try:
        new.rename(folder)
    except OSError:  # another process was faster
        folder = new
print(folder)
END
}

mapfile -t places < <(folders | awk 'NF && !seen[$0]++')
path=$here/lib
if compgen -G "$here/lib/*.gz" >/dev/null; then path+=:$(unpacked); fi
missing=()
warnings=
while read -r library need purpose; do
    found=
    for folder in "${places[@]}"; do
        if [[ -e $folder/$library ]]; then
            found=$folder
            break
        fi
    done
    if [[ ! $found && $need == needed ]]; then
        missing+=("$library")
    elif [[ ! $found ]]; then
        warnings+="warning: no $library, for ${purpose%; *}; going on without it ($python -m pip install ${purpose##*; })"$'\n'
    elif [[ :$path: != *:$found:* ]]; then
        path+=:$found
    fi
done <"$here/cuda-libraries.txt"
trouble=
for library in "${missing[@]}"; do
    trouble+="error: no $library in CUDA_HOME, among the system's libraries or in the packages of $(command -v "$python")"$'\n'
done

# Only for the programs of the bundle: Python's modules have their own libraries.
export BUNDLE=$here BUNDLE_LIBRARY_PATH=$path
if [[ ${1-} == run ]]; then
    printf %s "$trouble" >&2
    [[ ! $trouble ]] || exit 1
    program=$2
    shift 2
    LD_LIBRARY_PATH=$path exec "$here/bin/$program" "$@"
fi
# main.py checks the arguments first, and then reports missing libraries.
export BUNDLE_TROUBLE=$trouble BUNDLE_WARNINGS=$warnings
exec "$python" "$here/dev/gpu/main.py" "$@"
