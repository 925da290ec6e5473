"""`make bundle` and `make gpu-check` without a GPU. The bundle runs on a bare machine. The parts of the check run with the
trainer on the tests' CUDA runtime. Messages about missing or failing things are checked."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

import bare_machine
import run_paths

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BUILD_DIR", ROOT / "build"))
SIMULATED = [BUILD / "test" / name for name in ("train_gpt-plain", "model_probe-plain", "op_check-plain", "kernels-thread")]
PATIENCE = float(os.environ.get("PATIENCE", 1))
ALGORITHMS = "algorithms of cuBLASLt for GPT-2 124M"

sys.path.insert(0, str(ROOT / "dev/gpu"))
import part_bench  # noqa: E402
import part_first  # noqa: E402
import results  # noqa: E402


def make_bundle(folder, programs, profiler="none", megabytes=60):
    return subprocess.run([ROOT / "dev/gpu/bundle.sh", folder, profiler, *programs], capture_output=True, text=True,
                          env={**os.environ, "PYTHON": sys.executable, "BUNDLE_MEGABYTES": str(megabytes)})


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """A bundle whose programs run on a simulated GPU."""
    missing = [path for path in SIMULATED if not path.exists()]
    if missing:
        pytest.skip(f"{missing[0].name} is not built here: cublasLt.h and nccl.h are not both here")
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    made = make_bundle(folder, SIMULATED, megabytes=100)  # one of them has ThreadSanitizer
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture
def copy(simulated, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(simulated, tmp_path / "bundle")


def path_of_tests():
    """The PATH with the tests' own python3 first."""
    return f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"


def check(bundle, *arguments, **environment):
    """Runs gpu_check of a bundle."""
    return subprocess.run([bundle / "gpu_check", *map(str, arguments)], capture_output=True, text=True, timeout=200 * PATIENCE,
                          env={**os.environ, "PATH": path_of_tests(), **environment})


def tool(tmp_path, name, script):
    """A folder with a tool that is a shell script."""
    folder = tmp_path / "tools"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh{script}")
    (folder / name).chmod(0o755)
    return folder


def lines_of(folder):
    return results.read(folder / "gpu.jsonl")


def by_name(folder):
    return {line["name"]: line for line in lines_of(folder)}


# ---- On a machine with little -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    reason = bare_machine.why_not()
    if reason:
        pytest.skip(reason)
    return bare_machine.BareMachine(tmp_path_factory.mktemp("bare"))


def test_runs_where_only_python_is(simulated, bare):
    """Without PyTorch, MPI, and everything that the programs were built with."""
    bare.show(simulated, "/bundle")
    run = bare.run("/bundle/gpu_check first model bench --tiny --results /tmp/results", 200 * PATIENCE)
    assert run.returncode == 0, run.stdout + run.stderr
    found = by_name(bare.root / "tmp/results")
    failed = [line for line in found.values() if line["status"] == "failed"]
    assert not failed
    passed = {name for name, line in found.items() if line["status"] == "passed"}
    assert {"4 steps twice, bit for bit, flash attention", "stopped after 2 steps and resumed, bit for bit, flash attention",
            "4 steps on 2 NCCL ranks that share the GPU, fp32", "4 steps against the CPU device, bf16",
            "4 steps of each schedule of a pipeline of 2 NCCL ranks, bit for bit, bf16", "tiny, turn 2, train_gpt, flash attention"} <= passed
    for name in "loss and gradients against PyTorch, bf16", "te-fp8 against the CPU device":
        assert found[name]["detail"] == "python3 has no PyTorch here"
    assert "train_gpt on a simulated GPU" in (bare.root / "tmp/results/gpu.md").read_text()
    assert json.loads((bare.root / "tmp/results/gpu.json").read_text())["rates"]


def test_names_cuda_libraries_that_are_missing(bare, tmp_path):
    """The trainer for GPUs. The machine has nothing of CUDA; then it has one library, then the other, then both."""
    trainer, probe = (BUILD / "gpu" / name for name in ("train_gpt", "model_probe"))
    if not trainer.exists():
        pytest.skip("the trainer for GPUs is not built here: `make bundle` builds it")
    made = make_bundle(tmp_path / "bundle", [trainer, probe])
    assert made.returncode == 0, made.stderr
    bare.show(tmp_path / "bundle", "/cuda-bundle")

    def missing(**environment):
        run = bare.run("/cuda-bundle/gpu_check run train_gpt --version", 60 * PATIENCE, **environment)
        named = [line.split()[2] for line in run.stderr.splitlines() if line.startswith("error: no ")]
        assert (run.returncode == 1) == bool(named), run.stdout + run.stderr
        return named, run.stdout or run.stderr

    assert missing()[0] == ["libcublasLt.so.13", "libnccl.so.2"]
    linked = {line.split()[0]: line.split()[2] for line in
              subprocess.run(["ldd", trainer], capture_output=True, text=True).stdout.splitlines() if "=> /" in line}
    bare.show(run_paths.find(trainer, "libcublasLt.so.13"), "/opt/cuda/lib64/libcublasLt.so.13")
    assert missing()[0] == ["libcublasLt.so.13", "libnccl.so.2"]
    assert missing(CUDA_HOME="/opt/cuda")[0] == ["libnccl.so.2"]
    # In the place of PyTorch's packages.
    bare.show(linked["libnccl.so.2"], bare_machine.PACKAGES / "nvidia/nccl/lib/libnccl.so.2")
    named, said = missing(CUDA_HOME="/opt/cuda")
    assert not named and said.startswith("train_gpt"), said
    no_gpu = bare.run("/cuda-bundle/gpu_check kernels", 60 * PATIENCE, CUDA_HOME="/opt/cuda")
    *wanted, last = no_gpu.stderr.splitlines()
    assert no_gpu.returncode == 1 and last.startswith("error: --device cuda: no GPU")
    # The check continues without these.
    assert wanted == ["warning: no libcudnn.so.9, for --attention cudnn; going on without it (python3 -m pip install nvidia-cudnn-cu13)",
                      "warning: no libnvrtc.so.13, for cuDNN, while it runs; going on without it (python3 -m pip install nvidia-cuda-nvrtc)"]


def test_arguments_come_before_what_is_missing(simulated, tmp_path):
    """On a machine without GPUs and CUDA's libraries, with a python3 that has no packages."""
    python = tool(tmp_path, "python3", f'\nexec {sys.executable} -S "$@"\n') / "python3"
    bundle = shutil.copytree(simulated, tmp_path / "bundle")
    (bundle / "cuda-libraries.txt").write_text("libnowhere.so.1 needed\n")
    environment = {"PYTHON": str(python), "PYTHONPATH": "", "SIMT_GPUS": "0"}
    helped = check(bundle, "--help", **environment)
    assert helped.returncode == 0 and helped.stderr == "" and "--minutes" in helped.stdout
    wrong = check(bundle, "foo", **environment)
    assert wrong.returncode == 2 and wrong.stderr.endswith(
        "error: there is no part foo; there are first, kernels, model, bench, lab\n")
    for arguments, what in (["run"], "run takes a program"), (["run", "foo"], "there is no program foo"):
        wrong = check(bundle, *arguments, **environment)
        assert (wrong.returncode, wrong.stderr) == (2, f"error: {what}; there are kernels, model_probe, op_check, train_gpt\n")
    for arguments in (["model"], ["run", "train_gpt", "--version"]):
        missing = check(bundle, *arguments, **environment)
        assert missing.returncode == 1 and missing.stdout == ""
        assert missing.stderr.startswith("error: no libnowhere.so.1 in CUDA_HOME") and missing.stderr.count("\n") == 1


def test_size(tmp_path):
    """A bundle that is too large is refused. (long_bundle.py makes one with the real programs of `make bundle`.)"""
    large = tmp_path / "large"
    large.write_bytes(pathlib.Path("/bin/true").read_bytes())
    padded = make_bundle(tmp_path / "bundle", [large], profiler=padding(tmp_path))
    assert padded.returncode == 1 and "larger than 60 MB" in padded.stderr


def padding(tmp_path):
    file = tmp_path / "padding"
    with open(file, "wb") as opened:
        for _ in range(70):
            opened.write(os.urandom(1 << 20))
    return file


# ---- With PyTorch -------------------------------------------------------------------------------------------


def test_all_parts_with_pytorch(copy, tmp_path):
    """Also without numpy, which PyTorch's packages do not include."""
    pytest.importorskip("torch")
    none = tmp_path / "modules/numpy/__init__.py"
    none.parent.mkdir(parents=True)
    none.write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    tools = tool(tmp_path, "nvidia-smi", """
case $* in
    *name,driver*) echo 'Test GPU, 580.1, 81559 MiB' ;;
    *clocks_event*) exit 2 ;;  # an older driver, which knows the other name
    *clocks_throttle*) echo 0x0000000000000024 ;;
    *clocks.sm*) echo '1980 MHz, 2619 MHz, 55, 690.1 W, 100 %' ;;
esac
""")
    run = check(copy, "model", "bench", "lab", "--tiny", "--results", tmp_path / "results", PATH=f"{tools}:{path_of_tests()}",
                PYTHONPATH=str(tmp_path / "modules"))
    assert run.returncode == 0, run.stdout + run.stderr
    results_of_it = tmp_path / "results/test-gpu"
    found = by_name(results_of_it)
    clocks = found["tiny, turn 1, PyTorch"]["clocks_while"]
    assert clocks["clocks.sm"] == "1980 MHz" and clocks["slowed by"] == "power cap, software thermal slowdown"
    assert "# train_gpt on Test GPU" in (results_of_it / "gpu.md").read_text()
    skipped = {name for name, line in found.items() if line["status"] == "skipped"}
    # Parts that need a GPU, cuDNN, or a GPU with products in 8 bits.
    assert all("cudnn" in name or "te-fp8" in name or name in (
        "the GPU's own rates", "the kernels compared with cuBLASLt and cuDNN", "tiny, time outside kernels, train_gpt",
        "every variant of the kernel lab") for name in skipped), skipped
    for name in ("loss and gradients against PyTorch, fp32", "loss and gradients against PyTorch, bf16",
                 "3 steps of AdamW against PyTorch, fp32", "3 steps against the CPU device, fp32, flash attention",
                 "2 steps against the CPU device, bf16, flash attention", "tiny, turn 2, PyTorch"):
        assert found[name]["status"] == "passed"
    # The loss of a model that has learned nothing shows that both programs saw the same kind of batch.
    assert found["tiny, turn 1, PyTorch"]["loss"] == pytest.approx(found["tiny, turn 1, train_gpt, flash attention"]["loss"], rel=0.1)


def test_every_check_of_the_model_can_fail(copy, tmp_path):
    """The probe computes wrong results. The trainer uses another rate in each of these cases: on the CPU, against PyTorch, in
    its second run, after resuming, on two ranks, in a ZeRO stage, in a schedule and with offload. Each fault is reported, and
    the later checks still run."""
    pytest.importorskip("torch")
    plant(copy, "model_probe", '| sed "s/^./9/"')
    plant(copy, "train_gpt", """
case "$*" in
    */many-cpu*) set -- "$@" --lr=1 ;;
    *device=cpu*|*out-dir=*/adamw/*|*out-dir=*/again*|*--resume*|*/ranks-2*|*/stage-1*|*/gpipe*|*/cpu-cpu*) set -- "$@" --lr=0.03 ;;
esac""")
    run = check(copy, "model", "--tiny", "--results", tmp_path / "results")
    assert run.returncode == 1
    found = by_name(tmp_path / "results")
    assert "loss" in found["loss and gradients against PyTorch, fp32"]["detail"]
    assert "--zero-stage 1" in found["4 steps of each ZeRO stage on 2 NCCL ranks, bit for bit, bf16, 2 micro-batches, reduced every "
                                     "micro-batch"]["detail"]
    assert "--pipeline-schedule gpipe" in found["4 steps of each schedule of a pipeline of 2 NCCL ranks, bit for bit, bf16"]["detail"]
    assert "--offload-parameters cpu" in found["4 steps with the state and the layers in host memory and on a disk, bit for bit, bf16"]["detail"]
    failed = {name for name, line in found.items() if line["status"] == "failed"}
    assert failed == set(found) - {"machine"} - {name for name in found if "cudnn" in name or "te-fp8" in name}
    assert f"{len(failed)} failed" in (tmp_path / "results/gpu.md").read_text()
    assert run.stdout.splitlines()[-2].endswith(f"; {len(failed)} failed")


def plant(bundle, program, change):
    """Replaces a program: runs shell commands before it, or with a leading |, filters its output."""
    path = bundle / "bin" / program
    path.rename(bundle / "bin" / f"right_{program}")
    before, after = ("", change) if change.startswith("|") else (change, "")
    path.write_text(f'#!/bin/sh{before}\n{"" if after else "exec "}{bundle}/bin/right_{program} "$@" {after}\n')
    path.chmod(0o755)


def test_the_first_checks(simulated, tmp_path):
    """On two GPUs that multiply in 8 bits."""
    pytest.importorskip("torch")
    run = check(simulated, "first", "--tiny", "--results", tmp_path / "results", SIMT_CHIP="90", SIMT_GPUS="2")
    assert run.returncode == 0, run.stdout + run.stderr
    found = by_name(tmp_path / "results")
    assert set(found) == {"machine", *part_first.CHECKS}
    measured = {name for name, line in found.items() if line["status"] == "measured"}
    assert measured == {"machine", ALGORITHMS, "NCCL_MAX_CTAS=32, two pipeline stages on two GPUs"}
    assert {line["status"] for line in found.values()} == {"measured", "passed"}
    assert found[ALGORITHMS]["failing"] == found[ALGORITHMS]["varying"] > 0  # one each of every product


def test_the_first_checks_go_on_whatever_fails(copy, tmp_path):
    """A module ends the process of a check, one program crashes, and another one hangs. One file tells all."""
    module = tmp_path / "modules/torch/__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("import os\nprint('torch crashes', flush=True)\nos.abort()\n")
    plant(copy, "train_gpt", """
case "$*" in
    *steps=2*) echo "note: cuBLASLt's algorithms that failed: 3, that gave"; echo '  other bits each time: 1; they are left out' ;;
    *out-dir=*/ranks-2*) echo 'it hangs'; exec sleep 1000 ;;
    *offload-optimizer=cpu*) echo 'it crashes'; kill -SEGV $$ ;;
esac""")
    run = check(copy, "first", "--tiny", f"--minutes={0.75 * PATIENCE}", "--results", tmp_path / "results", PYTHONPATH=str(module.parents[1]))
    file = tmp_path / "results/gpu.jsonl"
    assert (run.returncode, run.stderr) == (1, "") and run.stdout.splitlines()[-1] == f"to send back: {file}"
    found = by_name(file.parent)
    fp8, algorithms, ptx, stages, _, offload = (found[name] for name in part_first.CHECKS)
    assert (fp8["status"], fp8["detail"]) == ("failed", "the check ended with status -6") and "torch crashes" in fp8["output"]
    assert (algorithms["failing"], algorithms["varying"]) == (3, 1)
    assert ptx["status"] == "passed" and ptx["tests"] > 10
    assert stages["status"] == "failed" and "was ended after" in stages["detail"] and "it hangs" in stages["output"]
    assert offload["status"] == "failed" and "it crashes" in offload["output"]


@pytest.mark.parametrize("said, fits", [
    ("error: --micro-batch-size 4: 9 parameters and a micro-batch of 4 sequences need 9 GiB of memory (the largest arenas are x), "
     "but the GPU has 8 GiB free; --micro-batch-size 2 would fit", 2),
    ("error: kernel wrong_kernel<float> failed: an illegal memory access was encountered", None)], ids=["memory", "a crash"])
def test_only_what_lacks_memory_is_tried_with_a_smaller_batch(said, fits, copy, tmp_path):
    plant(copy, "train_gpt", f"\ncase $* in *micro-batch-size=4*) echo '{said}' >&2; exit 1 ;; esac")
    run = check(copy, "bench", "--tiny", "--results", tmp_path / "results")
    turn = by_name(tmp_path / "results")["tiny, turn 1, train_gpt, flash attention"]
    if fits:
        assert run.returncode == 0, run.stdout + run.stderr
        assert (turn["status"], turn["batch"]) == ("passed", fits)
    else:
        assert run.returncode == 1
        assert turn["status"] == "failed" and "wrong_kernel" in turn["detail"]


def test_the_trainer_says_what_lacks_memory(simulated):
    """The message has the words by which the check recognizes it."""
    trainer = [simulated / "bin/train_gpt", "--model=gpt2", "--global-batch-tokens=16384", "--micro-batch-size=16"]
    for more, variables in ((["--steps=1"], {}), (["--model=tiny"], {"SIMT_FAIL": "memory:3"})):
        run = subprocess.run([*trainer, *more], capture_output=True, text=True, env={**os.environ, **variables}, cwd=simulated,
                             timeout=60 * PATIENCE)
        assert run.returncode == 1 and part_bench.lacks_memory(run.stderr), run.stderr


def test_a_kernel_test_that_fails(copy, tmp_path):
    """Each suite is a separate process, and one that crashes is named. If sanitizers refuse to run, this is reported but is no
    failure."""
    kernels = copy / "bin/kernels"
    kernels.write_text("""#!/bin/sh
case $* in
    --gtest_list_tests) printf 'Good.\\n  a\\nCrash/0.  # TypeParam = float\\n  b\\nLab.wrong.\\n  c\\n' ;;
    *Good*) echo '[       OK ] Good.a (1 ms)' ;;
    *Crash*) kill -SEGV $$ ;;
    *Lab*) printf 'x.cpp:1: Failure\\nit is 1 too large\\n[  FAILED  ] Lab.wrong.c (0 ms)\\n'; exit 1 ;;
esac
""")
    # Its results are the cases themselves.
    (copy / "bin/op_check").write_text("""#!/bin/sh
case $* in
    *rope*) echo 'rope.bf16.0/x element 3 is 1, not 2 within 0.01'; exit 1 ;;
    cpu*accumulate*) printf '\\002\\0\\0\\0\\0\\0\\0\\0{}' >$3 ;;
    *) cp $2 $3 ;;
esac
""")
    tools = tool(tmp_path, "compute-sanitizer", """
case $* in
    *memcheck*) printf '========= Error: Device not supported. Please refer to it\\n========= ERROR SUMMARY: 0 errors\\n' ;;
    *racecheck*optimizer_update*) echo 'killed in the middle'; exit 9 ;;
    *racecheck*Ptx*) echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)' ;;
    *) printf '========= Error: Race reported between Write access\\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\\n' ;;
esac
""")
    run = check(copy, "kernels", "--results", tmp_path / "results", PATH=f"{tools}:{path_of_tests()}")
    assert run.returncode == 1
    found = by_name(tmp_path / "results")
    assert found["Good"]["status"] == "passed" and found["Good"]["tests"] == 1
    assert found["Crash/0"]["status"] == "failed" and "status -11" in found["Crash/0"]["detail"]
    assert "Lab.wrong.c" in found["Lab.wrong"]["detail"] and "1 too large" in found["Lab.wrong"]["detail"]
    assert "element 3 is 1" in found["operation rope"]["detail"] and found["operation rope"]["status"] == "failed"
    assert "other bits on the CPU" in found["operation accumulate"]["detail"]
    assert found["operation optimizer_update"]["status"] == "passed" and found["operation optimizer_update"]["cases"] > 30
    memcheck = [line for name, line in found.items() if "memcheck" in name]
    assert {line["status"] for line in memcheck} == {"skipped"} and any("Device not supported" in line["detail"] for line in memcheck)
    assert found["compute-sanitizer racecheck, Ptx*"]["status"] == "passed"
    assert "Race reported between Write" in found["compute-sanitizer racecheck, matmul_backward"]["detail"]
    cut = found["compute-sanitizer racecheck, optimizer_update"]
    assert cut["status"] == "failed" and cut["detail"] == "it ended without a summary, with status 9: killed in the middle"


@pytest.mark.parametrize("script, status, detail", [
    ("echo 'error while loading shared libraries' >&2; exit 127", "failed", "kernels lists no tests: error while loading shared libraries"),
    ("exec sleep 100", "skipped", results.TIME_OVER)], ids=["it does not start", "it hangs"])
def test_a_program_that_does_not_list_its_tests_ends_its_part_alone(script, status, detail, copy, tmp_path):
    kernels = copy / "bin/kernels"
    kernels.write_text(f"#!/bin/sh\n{script}\n")
    run = check(copy, "kernels", "lab", "--tiny", "--minutes", "0.05", "--results", tmp_path / "results")
    assert (run.returncode, run.stderr) == (1 if status == "failed" else 2, "")
    found = by_name(tmp_path / "results")
    assert (found["the list of tests"]["status"], found["the list of tests"]["detail"]) == (status, detail)
    assert "operation accumulate" in found  # another program runs it
    assert found["every variant of the kernel lab"]["status"] == "skipped" and (tmp_path / "results/gpu.md").exists()


def test_arguments_that_mean_nothing_are_told(simulated, tmp_path):
    (tmp_path / "file").write_text("")
    run = check(simulated, "lab", "--tiny", "--results", tmp_path / "file")
    assert (run.returncode, run.stderr) == (1, f"error: --results: cannot make the folder {tmp_path}/file: File exists\n")
    for minutes in ("0", "-1", "nan", "inf"):
        run = check(simulated, "lab", "--tiny", f"--minutes={minutes}")
        assert run.returncode == 2 and run.stderr.endswith(f"error: argument --minutes: invalid minutes value: '{minutes}'\n")


def test_kernel_tests_run(copy, tmp_path):
    run = check(copy, "kernels", "--tiny", "--results", tmp_path / "results")
    assert run.returncode == 0, run.stdout + run.stderr
    tests = [line["tests"] for line in lines_of(tmp_path / "results") if "tests" in line]
    assert len(tests) == 2 and min(tests) > 0


def test_a_part_ends_when_its_time_is_over(copy, tmp_path):
    """Hanging programs are ended then, and the report names the checks that did not run."""
    plant(copy, "train_gpt", "\ncase $* in *steps=0*) ;; *) exec sleep 1000 ;; esac")
    start = time.monotonic()
    run = check(copy, "model", "--tiny", "--minutes", "0.1", "--results", tmp_path / "results")
    assert time.monotonic() - start < 60 * PATIENCE
    assert run.returncode == 2, run.stdout + run.stderr
    found = by_name(tmp_path / "results")
    cut = found["4 steps twice, bit for bit, flash attention"]
    assert (cut["status"], cut["detail"]) == ("skipped", results.TIME_OVER)
    left = sum(line["detail"].startswith(results.TIME_OVER) for line in found.values())
    assert run.stdout.splitlines()[-2].endswith(f"; 0 failed, {left} lacked the time: run it again, and they come first")
