"""The compiler's figures for the kernels. Kernels of llmc/ have no stack frame and spill nothing. They access memory by vectors
of 16 bytes. No kernel that is declared there, or that the trainer links, is missing. EveryKernel in
test/kernels/kernels_main.cpp tests that each also runs."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["BUILD_DIR"])
REPORT, LAB_REPORT = BUILD / "nvcc/report.txt", BUILD / "nvcc/lab-report.txt"
READER = ROOT / "dev/lab/kernel_report.py"
OF_LLMC = "_ZN4llmc4cuda"  # the beginning of the names of llmc::cuda
CHIPS = {80, 89, 90}  # if there is no GPU and no other chips were requested


def cuda_compiler():
    folder = subprocess.run([ROOT / "scripts/deps.sh", "cuda"], cwd=ROOT, capture_output=True, text=True, check=True)
    compiler = ROOT / folder.stdout.strip() / "bin/nvcc"
    if not compiler.exists():
        pytest.skip("no nvcc here; `make deps` installs one")
    return compiler


def parse(text):
    """{(chip, name): (registers, stack, spills, shared, most threads of a block)}"""
    kernels = {}
    for line in text.splitlines():
        chip, name, *figures = line.split()
        kernels[int(chip), name] = tuple(map(int, figures))
    return kernels


@pytest.fixture(scope="module")
def report():
    """The trainer's kernels and the lab's."""
    cuda_compiler()
    if not (REPORT.exists() and LAB_REPORT.exists()):
        pytest.skip("this build compiled no kernels (one with SANITIZE=1 does not)")
    kernels = parse(REPORT.read_text()) | parse(LAB_REPORT.read_text())
    if "GPU_ARCH" not in os.environ and not shutil.which("nvidia-smi"):
        assert chips_of(kernels) >= CHIPS
    return kernels


def chips_of(report):
    return {chip for chip, _ in report}


def test_kernels_of_llmc_spill_nothing(report):
    of_llmc = {key: figures for key, figures in report.items() if key[1].startswith(OF_LLMC)}
    assert chips_of(of_llmc) == chips_of(report)
    spilling = [f"{name} on sm_{chip}: {stack} bytes of stack, {spills} of spills"
                for (chip, name), (_, stack, spills, *_) in of_llmc.items() if stack or spills]
    assert not spilling, "\n".join(spilling)


# Kernels that move more than a third of their bytes element by element, and the reason why they may.
A_FEW = "these are a few numbers: sums of a block or a row, or parts of sums"
OF_BYTES = "four moments are four bytes; a warp's are contiguous"
BY_ARITHMETIC = "the kernel is bound by fp32's arithmetic"
OF_A_STEP = "the numbers of a step, once a thread, beside a few loads of state"
ROWS = "its rows may begin anywhere"
IN_8_BITS = "four elements: 8 bytes of bf16 beside 4 of fp8, so that a warp's access is contiguous in both"
NARROW = {
    **{f"{kernel} {what}": IN_8_BITS for kernel in ("quantise_kernel", "quantise_transpose_kernel3") for what in ("reads", "writes")},
    "combine_kernel1 reads": OF_A_STEP,
    "dequantise_nf4_kernel1 reads": "a word of indices and its block's magnitude; a warp's are contiguous",
    "copy_matrix_kernel1 reads": ROWS,
    "copy_matrix_kernel1 writes": ROWS,
    "momentum_kernel1 reads": OF_A_STEP,
    "update_kernel4 reads": OF_A_STEP,
    "update_eight_bit_kernel1 reads": OF_BYTES,
    "update_eight_bit_kernel1 writes": OF_BYTES,
    "bias_gradient_kernel4 writes": A_FEW,
    "bias_gradient_total_kernel4 reads": A_FEW,
    "bias_gradient_total_kernel4 writes": A_FEW,
    "classifier_from_statistics_kernel3 reads": A_FEW,
    "classifier_statistics_kernel3 writes": A_FEW,
    "global_norm_squared_kernel3 writes": A_FEW,
    "head_norm_backward_kernel3 writes": A_FEW,
    "head_norm_backward_sum_kernel3 reads": A_FEW,
    "head_norm_backward_sum_kernel3 writes": A_FEW,
    "head_norm_forward_kernel3 writes": A_FEW,
    "norm_backward_kernel5 writes": A_FEW,
    "norm_backward_sum_kernel5 reads": A_FEW,
    "norm_backward_sum_kernel5 writes": A_FEW,
    "store_kernel writes": A_FEW,
    "sum_parts_kernel3 writes": A_FEW,
    "sum_total_kernel3 reads": A_FEW,
    "sum_total_kernel3 writes": A_FEW,
    "order_rows_kernel4 reads": "tokens are sorted one by one",
    "order_rows_kernel4 writes": "tokens are sorted one by one",
    "sum_parts_kernel3 reads": "the numbers may begin anywhere",
    "attention_forward_kernel3 writes": BY_ARITHMETIC,
    "matmul_backward_kernel2 reads": BY_ARITHMETIC,
    "matmul_backward_kernel2 writes": BY_ARITHMETIC,
    "matmul_forward_kernel3 reads": BY_ARITHMETIC,
    "matmul_forward_kernel3 writes": BY_ARITHMETIC,
}
# Kernels that move more bf16 numbers one by one than a loop's last few.
ONE_BY_ONE = NARROW | {"matmul_forward_kernel6 reads": "the bias, once for a tile"}
# Only in these kernels does an access of 8 bytes count as wide: four bf16 numbers go with four fp32 numbers of 16 bytes.
BF16_BESIDE_FP32 = {"accumulate_kernel4", "update_eight_bit_kernel1", "attention_backward_keys_kernel2", "attention_backward_queries_kernel2",
                    "cast_kernel3", "momentum_kernel1", "rope_quads_kernel3", "update_kernel4"}
VECTOR = re.compile(r"(?:\.v(\d))?\.[a-z](\d+)$")


def read_accesses(log):
    """{(chip, name): a kernel's instructions for global memory}, such as ld.global.v4.u32, from the PTX that compile_nvcc
    keeps."""
    accesses = {}
    for line in log.splitlines():
        if found := re.match(r"\.target sm_(\d+)", line):
            chip = int(found[1])
        elif found := re.search(r"\.entry (\w+)", line):
            accesses[chip, found[1]] = of_kernel = []
        elif re.match(r"(ld|st|cp)\.", line):
            of_kernel.append(line)
    return accesses


def bytes_at_a_time(access, least=16):
    """(bytes by a vector of at least this many bytes, bytes otherwise): one of them is 0."""
    if access.startswith("cp.async.cg"):
        return 16, 0
    values, bits = VECTOR.search(access).groups()
    size = int(values or 1) * int(bits) // 8
    return (size, 0) if size >= (least if values else 16) else (0, size)


def narrow_accesses(name, accesses):
    """{"X_kernel1 reads": the reason why it should use wider accesses}"""
    kernel = re.match(OF_LLMC + r"\d+([a-z]\w*?_kernel\d*)[IE]", name)[1]
    faults = {}
    for what, kinds in ((f"{kernel} reads", ("ld", "cp")), (f"{kernel} writes", ("st",))):
        own = [access for access in accesses if access.startswith(kinds)]
        least = 8 if kernel in BF16_BESIDE_FP32 else 16
        wide, narrow = (sum(sizes) for sizes in zip((0, 0), *(bytes_at_a_time(access, least) for access in own)))
        if narrow * 2 > wide and what not in NARROW:
            faults[what] = f"{narrow} bytes by elements, {wide} by vectors"
        halves = sum(bytes_at_a_time(access) == (0, 2) for access in own)
        if halves > 5 and what not in ONE_BY_ONE:
            faults[what] = f"{halves} bf16 one by one"
    return faults


def accesses_of_kernels():
    logs = [BUILD / "nvcc" / path.relative_to(ROOT).with_suffix(end)
            for folder, end in (("dev", ".fatbin.log"), ("llmc/device/cuda", ".o.log")) for path in (ROOT / folder).glob("*.cu")]
    accesses = {}
    for log in filter(pathlib.Path.exists, logs):
        accesses |= read_accesses(log.read_text())
    return accesses


def test_kernels_of_llmc_access_memory_by_vectors(report):
    accesses = accesses_of_kernels()
    of_llmc = {key for key in report if key[1].startswith(OF_LLMC)}
    assert of_llmc <= accesses.keys()
    narrow = [f"{what} on sm_{chip}: {fault} ({name})" for chip, name in sorted(of_llmc)
              for what, fault in narrow_accesses(name, accesses[chip, name]).items()]
    assert not narrow, "\n".join(narrow)


def test_the_classifier_reads_what_it_keeps_once(report):
    """It reads them into shared memory. It loads again only what does not fit there: for its sum, four times in a loop, and for
    its gradient."""
    of_classifier = {key: own for key, own in accesses_of_kernels().items() if f"{OF_LLMC}24fused_classifier_kernel5" in key[1]}
    assert len(of_classifier) == 6 * len(chips_of(report))  # three dtypes, with a cap and without
    for key, own in of_classifier.items():
        loads = [access for access in own if access.startswith("ld") and bytes_at_a_time(access)[0]]
        assert len(loads) <= 5 and any(access.startswith("cp.async") for access in own), (key, own)


def test_what_narrow_accesses_are():
    def narrow(*accesses, kernel="20gelu_forward_kernel3"):
        return [*narrow_accesses(f"_ZN4llmc4cuda{kernel}IfEEvPT_PKS2_l", accesses)]

    wide = ["ld.global.cs.v4.u32", "ld.global.v2.f64", "ld.global.b128", "cp.async.cg.shared.global", "st.global.v4.f32"]
    assert narrow(*wide, *5 * ["ld.global.u16"]) == []
    assert narrow(*wide, *4 * ["st.global.f32"], "ld.global.f64") == ["gelu_forward_kernel3 writes"]
    assert narrow(*wide, *8 * ["ld.global.u16"]) == ["gelu_forward_kernel3 reads"]
    of_8_bytes = ["ld.global.cs.v2.u32", "st.global.v4.u16"]
    assert narrow(*of_8_bytes) == ["gelu_forward_kernel3 reads", "gelu_forward_kernel3 writes"]
    assert narrow(*of_8_bytes, kernel="12cast_kernel3") == []


def test_no_kernel_of_llmc_is_missing(report):
    declared = set()
    for path in (ROOT / "llmc/device/cuda").glob("*.cuh"):
        declared |= set(re.findall(r"__global__[^;{]*?\b(\w+)\(", re.sub(r"__launch_bounds__\([^)]*\)", "", path.read_text())))
    assert declared
    of_trainer = parse(REPORT.read_text())
    for chip in chips_of(report):
        reported = " ".join(name for of_chip, name in of_trainer if of_chip == chip)
        missing = {name for name in declared if f"{len(name)}{name}" not in reported}
        assert not missing, f"the trainer links no {missing} for sm_{chip}"


def linked_kernels():
    """The kernels in the objects that the trainer is linked with, by the names that are registered with CUDA's runtime."""
    objects = [word for word in (BUILD / "gpu.txt").read_text().split() if "/nvcc/" in word]
    if not objects:
        pytest.skip("the trainer was built without CUDA")
    texts = subprocess.run(["readelf", "-W", "-p", ".rodata.str1.1", "-p", ".rodata.str1.8", *objects], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\] +(_Z\w+)$", texts, re.M))


def test_no_kernel_of_the_trainer_is_missing(report):
    linked = linked_kernels()
    assert len(linked) >= 60, linked
    for chip in chips_of(report):
        missing = linked - {name for of_chip, name in report if of_chip == chip}
        assert not missing, f"the report for sm_{chip} lacks {missing}"


def test_all_kernels_compile_together(tmp_path):
    headers = sorted(path.relative_to(ROOT) for path in (ROOT / "llmc/device/cuda").glob("*.cuh"))
    (tmp_path / "all.cpp").write_text("".join(f'#include "{header}"\n' for header in headers))
    include = cuda_compiler().parent.parent / "include"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wno-unknown-pragmas", f"-I{ROOT}", f"-I{ROOT / 'test'}", "-isystem", include]
    built = subprocess.run([*command, tmp_path / "all.cpp"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


# More values at a time than fit in 32 registers.
SPILLING = """
__global__ void __launch_bounds__(1024, 2) spills(float* x) {
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[63 - i] * v[(i * 7) % 64];
}
__global__ void does_not(float* x) { x[threadIdx.x] = 0; }
"""


def test_a_spill_is_seen(tmp_path):
    (tmp_path / "spills.cu").write_text(SPILLING)
    log = subprocess.run([cuda_compiler(), "-cubin", "-arch=sm_80", "-Xptxas", "-v", "spills.cu"], cwd=tmp_path,
                         capture_output=True, text=True, check=True)
    (tmp_path / "spills.log").write_text(log.stderr)
    text = subprocess.run([sys.executable, READER, tmp_path / "spills.log"], capture_output=True, text=True, check=True)
    kernels = parse(text.stdout)
    assert set(kernels) == {(80, "_Z6spillsPf"), (80, "_Z8does_notPf")}
    registers, stack, spills, *_ = kernels[80, "_Z6spillsPf"]
    assert registers == 32 and stack > 0 and spills > 0
    assert kernels[80, "_Z8does_notPf"][1:3] == (0, 0)


def test_what_is_read_of_a_log(tmp_path):
    (tmp_path / "log").write_text(
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas info    : Function properties for k\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem\n"
        ".target sm_80\n.visible .entry k(\n.maxntid 512\nld.global.cs.v4.u32\n"
        ".target sm_90a\n.visible .entry unbounded(\n.visible .entry k(\n.maxntid 32, 8, 1\n")
    text = subprocess.run([sys.executable, READER, tmp_path / "log"], capture_output=True, text=True, check=True)
    assert text.stdout == "90 k 255 16 20 1024 256\n"
    # Chips of a family are read too. Lines that cannot be read are an error; no kernel is dropped.
    log = (tmp_path / "log").read_text().replace("sm_90a", "sm_100f")
    (tmp_path / "log").write_text(log)
    text = subprocess.run([sys.executable, READER, tmp_path / "log"], capture_output=True, text=True, check=True)
    assert text.stdout == "100 k 255 16 20 1024 256\n"
    (tmp_path / "log").write_text(log.replace("'sm_100f'", "'sm_xyz'"))
    assert subprocess.run([sys.executable, READER, tmp_path / "log"], capture_output=True).returncode == 1


def test_launch_bounds_are_in_it(report):
    """A kernel of each kind: with bounds that do not depend on its template's arguments, with bounds that do, and without
    bounds."""
    for chip in chips_of(report):
        most_threads = {name: figures[-1] for (of_chip, name), figures in report.items() if of_chip == chip}
        assert most_threads["_ZN4llmc4cuda12fill_kernel2IfEEvPT_S2_ll"] == 512
        assert most_threads["_ZN4llmc4cuda25norm_backward_sum_kernel5ILi32EEEvPfS2_PKfiii"] == 1024
        assert most_threads["_ZN4llmc4cuda27bias_gradient_total_kernel4ILi256EEEvPfPKfii"] == 256
        assert most_threads["_ZN3lab21gelu_forward_variants20gelu_forward_kernel1IfEEvPT_PKS2_l"] == 1024
