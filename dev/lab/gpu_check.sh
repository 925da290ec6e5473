#!/usr/bin/env bash
# The kernels' tests and the lab's timings on a GPU.
#
#   gpu_check.sh bundle FOLDER   makes FOLDER/bundle of FOLDER/kernels: the program, the libraries that a machine with
#                                CUDA may lack, and this script
#   bundle/gpu_check.sh run [RESULTS]
#                                runs the tests, then times the lab; RESULTS (default: the bundle) gets tests.xml and
#                                timings.jsonl, for dev/lab/report.py. Exit status 1 where a test failed.
set -euo pipefail

# The system's own C library and the driver's stay where they are.
libraries_of() {
    ldd "$1" | awk '$3 ~ /^\// { print $3 }' | grep -Ev '/(libc|libm|libdl|librt|libpthread|ld-linux[^/]*|libcuda)\.so'
}

case ${1-} in
    bundle)
        bundle=$2/bundle
        rm -rf "$bundle"
        mkdir -p "$bundle"
        cp "$2/kernels" "$0" "$bundle"
        libraries_of "$2/kernels" | while read -r library; do cp -L "$library" "$bundle"; done
        du -sh "$bundle" | sed 's/\t/ in /'
        ;;
    run)
        here=$(cd "$(dirname "$0")" && pwd)
        results=${2:-$here}
        mkdir -p "$results"
        export LD_LIBRARY_PATH=$here${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        status=0
        "$here/kernels" --gtest_output="xml:$results/tests.xml" --gtest_brief=1 || status=1
        rm -f "$results/timings.jsonl"
        "$here/kernels" --time "$results/timings.jsonl" || status=1
        exit $status
        ;;
    *)
        sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
        exit 1
        ;;
esac
