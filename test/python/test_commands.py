"""The commands of the Makefile and of scripts/deps.sh do what a person expects of them, also on a machine that lacks something.
They are tried in a small project of the same layout, which has only a few files."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import program

sys.path.append(str(program.ROOT / "test"))

import run_suites  # noqa: E402

ROOT = program.ROOT
# Variables of a make that runs these tests must not reach their own makes.
OF_THE_CALLER = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "BUILD", "SANITIZE", "CXXFLAGS", "LDFLAGS", "V", "MPI", "GPU_ARCH", "CUDA",
                 "CUDA_HOME", "CXX", "WERROR"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OF_THE_CALLER}
WITHOUT_MPI = "llmc/comm/transport_no_mpi.cpp"
# far.h includes near.h, so that dependents are found through other headers too.
FILES = {
    "llmc/near.h": "inline int near() { return 1; }\n",
    "llmc/far.h": '#include "llmc/near.h"\n',
    "llmc/core/version.cpp": "const char* commit = LLMC_COMMIT;\n",
    "llmc/uses_near.cpp": '#include "llmc/near.h"\n',
    "llmc/uses_far.cpp": '#include "llmc/far.h"\n',
    "llmc/uses_none.cpp": "",
    "llmc/data/bpe.cpp": "",
    "llmc/comm/transport_mpi.cpp": "#include <mpi.h>\n",
    WITHOUT_MPI: "",
    "llmc/device/cuda/no_cuda.cpp": "",
    "llmc/comm/nccl/no_nccl.cpp": "",
    "train_gpt.cu": '#include "llmc/far.h"\nint main() {}\n',
    "dev/precompiled.h": "",
    ".gitignore": (ROOT / ".gitignore").read_text(),
}


class Project:
    def __init__(self, folder):
        self.folder = folder
        for name, text in FILES.items():
            self.write(name, text)
        for name in ("Makefile", "dev/kernels.mk", "test/simt/runtime.mk", "dev/gpu/check.mk", "scripts/deps.sh"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        self.git("init", "-q")
        self.commit()

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def git(self, *arguments):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments], cwd=self.folder, check=True)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")

    def make(self, *arguments, **variables):
        """make's output. No CUDA is found unless the arguments say where it is."""
        run = subprocess.run(["make", "CUDA_FOLDER=none", *arguments], cwd=self.folder, env=ENVIRONMENT | variables, capture_output=True,
                             text=True, timeout=120)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def made(self, *arguments):
        """The files that `make ARGUMENTS` compiles, and the programs that it links."""
        text = self.make(*arguments)
        return tuple(set(re.findall(rf"^(?:echo ')?{verb} ([\w./-]+)", text, re.M)) for verb in ("compile", "link"))


SOURCES = {name for name in FILES if name.endswith((".cpp", ".cu"))} - {WITHOUT_MPI}
EVERYTHING = SOURCES, {"train_gpt"}
NOTHING = set(), set()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Each test leaves the trainer built."""
    project = Project(tmp_path_factory.mktemp("project"))
    assert project.made() == EVERYTHING
    return project


def test_make_builds_what_a_change_affects(project):
    assert project.made() == NOTHING and "up to date" in project.make()
    os.utime(project.folder / "llmc/near.h")
    assert project.made() == ({"llmc/uses_near.cpp", "llmc/uses_far.cpp", "train_gpt.cu"}, {"train_gpt"})
    project.commit()
    assert project.made() == ({"llmc/core/version.cpp"}, {"train_gpt"})
    assert project.made("CXXFLAGS=-DX") == EVERYTHING and project.made("CXXFLAGS=-DX") == NOTHING
    assert project.made() == EVERYTHING


@pytest.fixture
def clang(tmp_path):
    """A clang++ that has OpenMP's header if the file `omp.h` is beside it."""
    script = tmp_path / "clang++"
    script.write_text('#!/bin/sh\ncat > /dev/null  # as a compiler does: a closed pipe would fail the command before it\n'
                      '[ -e "$(dirname "$0")/omp.h" ]\n')
    script.chmod(0o755)
    return script


def test_openmp_of_clang_is_its_own_or_another_ones(clang, tmp_path):
    """Debian's packages of OpenMP's versions exclude one another, so another version that is installed must do."""
    def says(word):
        environment = ENVIRONMENT | {"CXX": f"ccache {clang}"}
        return subprocess.run(["scripts/deps.sh", word], cwd=ROOT, env=environment, capture_output=True, text=True).stdout.strip()
    others = list(pathlib.Path("/usr/lib").glob("llvm-*/lib/libomp.so"))
    assert (says("openmp") == "") == (not others)
    if not others:
        assert "libomp-dev (omp.h)" in says("missing")
    (tmp_path / "omp.h").touch()
    assert says("openmp") == "" and "libomp" not in says("missing")


def test_without_mpi_another_file_replaces_the_one_for_mpi(project):
    assert project.made("MPI=0") == ({WITHOUT_MPI}, {"train_gpt"})
    assert project.made("MPI=0") == NOTHING
    assert "-lmpi" in project.make("-n", "train_gpt") and "-lmpi" not in project.make("-n", "train_gpt", "MPI=0")
    project.make()


# Each development package, with what its absence hides from the compiler: libraries to link, or a header. The headers of a
# library stay, as libboost-dev leaves those of libboost-context-dev.
HIDDEN = {
    "libboost-context-dev": ["-lboost_context"],
    "libcli11-dev": ["<CLI/CLI.hpp>"],
    "libdnnl-dev": ["-ldnnl"],
    "libfmt-dev": ["-lfmt"],
    "libgtest-dev": ["-lgtest", "-lgtest_main"],
    "libopenmpi-dev": ["-lmpi"],
    "librandom123-dev": ["<Random123/philox.h>"],
    "libtomlplusplus-dev": ["-ltomlplusplus"],
    "libutf8proc-dev": ["-lutf8proc"],
    "libxxhash-dev": ["-lxxhash"],
    "libyaml-cpp-dev": ["-lyaml-cpp"],
    "nlohmann-json3-dev": ["<nlohmann/json.hpp>"],
}
OF_THE_COMPILER = {"-ldl", "-lpthread", "-lrt"}


@pytest.fixture
def machine(tmp_path):
    """A function that gives the environment of a machine on which dpkg lacks packages and the compiler does not find what is
    hidden, and on which apt and pip can install nothing."""
    def environment(packages, hidden="nothing"):
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        scripts = {
            "dpkg-query": f'[ $1 = -W ] && /usr/bin/dpkg-query "$@" | grep -vE "^({"|".join(packages)}) "',
            "g++": f"""source=
                case " $* " in *" - "*) source=$(cat) ;; esac
                case " $* $source " in *"{hidden}"[[:space:]]*) exit 1 ;; esac
                printf '%s\\n' "$source" | {shutil.which("g++")} "$@" """,
            "apt-get": "exit 1", "sudo": 'exec "$@"'}
        for name, script in scripts.items():
            (tools / name).write_text(f"#!/bin/sh\n{script}\n")
            (tools / name).chmod(0o755)
        return ENVIRONMENT | {"PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "PIP_NO_INDEX": "1"}
    return environment


def named_by_deps(project, environment):
    """The packages that `make deps` would install."""
    done = subprocess.run(["scripts/deps.sh"], cwd=project.folder, env=environment, capture_output=True, text=True, timeout=120)
    named = re.search("^deps: installing with apt, with their dependencies: (.*)$", done.stdout, re.M)
    return set(named[1].split()) if named else set()


@pytest.mark.parametrize("package, hidden", [(package, what) for package in HIDDEN for what in HIDDEN[package]])
def test_a_missing_library_is_named(package, hidden, project, machine):
    assert package in named_by_deps(project, machine([package], hidden))


@pytest.mark.more
def test_libraries_that_dpkg_does_not_know_are_found(project, machine):
    assert not named_by_deps(project, machine(HIDDEN)) & set(HIDDEN)


def test_every_library_that_the_build_links_is_looked_for():
    targets = ["train_gpt", "test-programs", "programs-long"]
    would = subprocess.run(["make", "-n", "-B", "V=1", *targets], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    linked = set(re.findall(r" (-l[\w-]+)", would.stdout)) - OF_THE_COMPILER
    assert linked == {what for hidden in HIDDEN.values() for what in hidden if what.startswith("-l")}, would.stderr


def test_missing_mpi_is_said_with_what_would_do(project, machine, tmp_path):
    """As on a machine where only MPI is missing."""
    environment = machine(["libopenmpi-dev"], "-lmpi")

    def make(*arguments):
        return subprocess.run(["make", "CUDA_FOLDER=none", f"BUILD={tmp_path}/build", *arguments], cwd=project.folder, env=environment,
                              capture_output=True, text=True, timeout=120)

    alone = make()
    assert alone.returncode == 2 and re.search(
        r"\*\*\* missing: libopenmpi-dev \(ompi-c\); run `make deps` or `make MPI=0` to do without MPI\.  Stop\.", alone.stderr), alone.stderr
    without = make("MPI=0")
    assert without.returncode == 0, without.stderr
    tested = make("test")
    assert tested.returncode == 2 and "error: apt failed" in tested.stderr and tested.stdout.endswith("\n0 passed, 1 failed\n"), tested.stdout


def test_clean(project):
    assert project.made("clean", "train_gpt") == EVERYTHING
    project.make("clean")
    left = subprocess.run(["git", "status", "--short", "--ignored"], cwd=project.folder, capture_output=True, text=True)
    assert left.stdout == ""
    project.make()


def test_help_lists_every_target(project):
    makefile = re.sub(r"\\\n", "", (project.folder / "Makefile").read_text())
    targets = {"train_gpt"}.union(*(line.split() for line in re.findall(r"^\.PHONY: ([a-z].*)$", makefile, re.M)))
    targets = {target for target in targets if not target.startswith(("programs-", "deps-of-"))}  # parts of others
    help_text = project.make("help")
    assert len(targets) > 10
    assert set(re.findall(r"^  ([a-z_-]+) +\S", help_text, re.M)) == targets
    # The help lists all variables of the Makefile that a user may set.
    variables = {"CXXFLAGS", "LDFLAGS", "SANITIZE", "BUILD", "PYTHON", "SUITE", "GPU_ARCH", "MPI", "V"}
    assert variables <= set(re.findall(r"\b([A-Z_]+)=", help_text))


class Toolkit:
    """Files with the names of CUDA's, but without content, and a project that would be built with them."""

    FILES = ["bin/nvcc", "include/cublasLt.h", "lib/libcublasLt.so.13", "lib/libcudart_static.a"]
    SOURCES = ["device/cuda/ops.cu", "device/cuda/cuda_ops.cpp", "device/cuda/cublaslt_library.cpp",
               "device/cuda/cudnn_attention.cpp", "device/cuda/no_cudnn.cpp", "comm/nccl/nccl_communicator.cpp"]

    def __init__(self, folder, project):
        self.folder, self.project = folder, project
        for name in self.FILES:
            self.add(name)
        self.add("include/cuda_runtime_api.h", "#define CUDART_VERSION  13020\n")
        (folder / "bin/nvcc").chmod(0o755)

    def add(self, name, text=""):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def gpus(self, says):
        """A machine with GPUs, where nvidia-smi prints this."""
        self.add("smi/nvidia-smi", f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
        (self.folder / "smi/nvidia-smi").chmod(0o755)
        return {"PATH": f"{self.folder}/smi:{os.environ['PATH']}"}

    def would(self, *arguments, **variables):
        """The commands that would build the trainer. Its link flags differ from before, so it is always linked."""
        arguments = ["-n", "train_gpt", "V=1", f"CUDA_FOLDER={self.folder}", "GPU=", "LDFLAGS=-s", *arguments]
        return self.project.make(*arguments, **variables).replace("\\\n", " ").splitlines()

    def link(self, *arguments):
        return next(line for line in self.would(*arguments) if line.endswith("-o train_gpt"))

    def says(self, *arguments):
        """The build's message about its GPU support."""
        return next(line for line in self.would(*arguments) if "link train_gpt" in line).split(" with ")[1].strip("'")

    def includes(self, *arguments):
        return re.findall(r"-isystem (\S+)", next(line for line in self.would(*arguments) if "-c llmc/device/cuda/cudnn_attention.cpp" in line))

    def targets(self, *arguments, **variables):
        nvcc = next(line for line in self.would(*arguments, **variables) if "bin/nvcc -std" in line)
        return re.findall(r"-gencode=arch=(\S+)", nvcc)


@pytest.fixture
def toolkit(tmp_path, project):
    for name in Toolkit.SOURCES:
        project.write(f"llmc/{name}", "")
    yield Toolkit(tmp_path / "python/nvidia/cu13", project)
    for name in Toolkit.SOURCES:
        (project.folder / "llmc" / name).unlink()
    shutil.rmtree(project.folder / ".cuda", ignore_errors=True)


def code(*chips):
    return [f"compute_{chip},code=sm_{chip}" for chip in chips]


def test_chips(toolkit):
    default = code("80", "89", "90a") + ["compute_90,code=compute_90"]
    assert toolkit.targets() == default
    assert toolkit.targets("GPU_ARCH=80 90a") == code("80", "90a")
    assert toolkit.targets(GPU_ARCH="89") == code("89")
    for says, chips in {"9.0": ["90a"], "10.0": ["100"], "8.9\n8.0\n8.9": ["80", "89"], "12.0": ["120"]}.items():
        own = toolkit.gpus(says)
        assert toolkit.targets("GPU=/dev/nvidia0", **own) == code(*chips)
        assert toolkit.targets("GPU=/dev/nvidia0", "GPU_ARCH=86", **own) == code("86")
        assert toolkit.targets(**own) == default, "no GPU is here"
    for wrong in ("80,90a", "75", "90b", "sm_90", ""):
        refused = subprocess.run(["make", "-n", "CUDA_FOLDER=none", f"GPU_ARCH={wrong}"], cwd=toolkit.project.folder, text=True,
                                 capture_output=True)
        assert refused.returncode == 2 and f"GPU_ARCH='{wrong}': the kernels take sm_80 and later" in refused.stderr, refused.stderr
    # Output that names no chip, or a chip on which the kernels do not run, is ignored.
    for says in ("NVIDIA-SMI has failed", "7.5", "[N/A]", ""):
        assert toolkit.targets("GPU=/dev/nvidia0", **toolkit.gpus(says)) == default


def test_what_the_gpu_part_has(toolkit):
    assert toolkit.says() == "CUDA 13.2 for sm_80 sm_89 sm_90a and later, no NCCL, no cuDNN"
    assert toolkit.says("GPU_ARCH=89") == "CUDA 13.2 for sm_89, no NCCL, no cuDNN"
    assert {"no_nccl.o", "no_cudnn.o", "cuda_ops.o", "ops.o"} <= {pathlib.Path(word).name for word in toolkit.link().split()}
    # Like Python's packages: each library in its own folder.
    toolkit.add("../nccl/include/nccl.h")
    assert "no NCCL" in toolkit.says()
    toolkit.add("../nccl/lib/libnccl.so.2")
    assert ", NCCL" in toolkit.says()
    toolkit.add("../cudnn/include/cudnn.h")
    toolkit.add("../cudnn/lib/libcudnn.so.9")
    assert "no cuDNN" in toolkit.says()
    toolkit.project.write(".cuda/include/cudnn_frontend.h", "")
    assert toolkit.says() == "CUDA 13.2 for sm_80 sm_89 sm_90a and later, NCCL, cuDNN"
    link = toolkit.link().split()
    assert {"nccl_communicator.o", "cublaslt_library.o", "cudnn_attention.o"} <= {pathlib.Path(word).name for word in link}
    beside = toolkit.folder.parent
    assert f"{beside}/nccl/lib/libnccl.so.2" in link
    # The program opens these when it needs them.
    assert f"-Wl,-rpath,{toolkit.folder}/lib" in link and f"-Wl,-rpath,{beside}/cudnn/lib" in link
    assert not any("libcublasLt" in word or "libcudnn" in word for word in link)


def with_nccl(toolkit):
    toolkit.add("include/nccl.h")
    toolkit.add("lib/libnccl.so.2")


def has_cudnn(said):
    return said.endswith(", cuDNN")


def test_headers_of_cudnns_frontend(toolkit, tmp_path):
    """They may be in .cuda/, next to CUDA's, or in a package of the current Python."""
    # Python's package, as pip installs it.
    package = tmp_path / "modules"
    (package / "include").mkdir(parents=True)
    (package / "include/cudnn_frontend.h").write_text("")
    about = package / "nvidia_cudnn_frontend-1.14.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cudnn-frontend\nVersion: 1.14.1\n")
    (about / "RECORD").write_text("include/cudnn_frontend.h,,\n")
    python = f"PYTHON=PYTHONPATH={package} /usr/bin/python3"
    assert not has_cudnn(toolkit.says(python)), "cudnn.h is not here"
    toolkit.add("include/cudnn.h")
    assert not has_cudnn(toolkit.says("PYTHON=/usr/bin/python3 -I -S"))
    assert has_cudnn(toolkit.says(python)) and str(package / "include") in toolkit.includes(python)
    toolkit.add("include/cudnn_frontend.h")
    assert has_cudnn(toolkit.says("PYTHON=/usr/bin/python3 -I -S"))
    toolkit.project.write(".cuda/include/cudnn_frontend.h", "")
    assert has_cudnn(toolkit.says()) and ".cuda/include" in toolkit.includes()


@pytest.mark.parametrize("target", ["bundle", "gpu-check", "bench"])
def test_what_can_do_without_cudnn_does(target, toolkit):
    with_nccl(toolkit)
    command = ["make", "-n", target, f"CUDA_FOLDER={toolkit.folder}", "GPU=/dev/nvidia0", "GPU_ARCH=90a",
               "PYTHON=/usr/bin/python3 -I -S"]

    def asked():
        # The project lacks some of the files that would then be built.
        would = subprocess.run(command, cwd=toolkit.project.folder, env=ENVIRONMENT, capture_output=True, text=True).stdout
        assert "build/gpu/kernels" in would
        return [line for line in would.splitlines() if "deps.sh gpu" in line or "without cuDNN" in line]

    assert asked() == ["echo 'warning: no cudnn.h here; going on without cuDNN' >&2"]
    toolkit.add("include/cudnn.h")
    assert asked() == ["scripts/deps.sh gpu optional"]
    toolkit.add("include/cudnn_frontend.h")
    assert asked() == []


def test_without_a_gpu_nothing_is_built_to_check_it(toolkit):
    with_nccl(toolkit)
    refused = subprocess.run(["make", "bench-gpu-check", f"CUDA_FOLDER={toolkit.folder}", "GPU="], cwd=toolkit.project.folder,
                             env=ENVIRONMENT, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith("error: no GPU here")


def test_without_the_internet_cudnns_frontend_is_a_warning_where_it_is_optional(toolkit):
    def deps(*arguments):
        return subprocess.run(["scripts/deps.sh", *arguments], cwd=toolkit.project.folder, capture_output=True, text=True,
                              env=ENVIRONMENT | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""})

    optional, asked_for = deps("gpu", "optional"), deps("gpu")
    assert optional.returncode == 0
    assert re.fullmatch("warning: PyPI's nvidia-cudnn-frontend==.* could not be installed; continuing without cuDNN .*\n", optional.stderr)
    assert asked_for.returncode == 1 and "error: could not install from PyPI" in asked_for.stderr


def test_python_is_installed_where_there_is_none_of_that_name(tmp_path):
    """The commands of the pages begin with `python`, which Debian has in a separate package. Here a system without apt has
    everything else."""
    for name in ("bash", "awk", "sed", "grep", "cut"):
        (tmp_path / name).symlink_to(shutil.which(name))

    def add(*names, does=""):
        for name in names:
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o755)

    def says():
        done = subprocess.run([ROOT / "scripts/deps.sh", "train"], cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
        return done.stdout + done.stderr

    add("pkg-config", "ompi_info", "python3")
    add("g++", does="while read -r line; do :; done")
    assert says() == "error: missing: python-is-python3 (Debian's names); install your system's packages for these\n"
    add("python")
    assert says() == "deps: everything needed is installed\n"


@pytest.mark.parametrize("missing, why", [(None, "CUDA=0"), ("bin/nvcc", "no nvcc here")] +
                         [(name, "no cuBLASLt here") for name in Toolkit.FILES[1:]])
def test_no_gpu_part(toolkit, missing, why):
    if missing:
        (toolkit.folder / missing).unlink()
    arguments = [] if missing else ["CUDA=0"]
    assert toolkit.says(*arguments) == f"no CUDA ({why})"
    link = toolkit.link(*arguments)
    assert "no_cuda.o" in link and "cuda_ops.o" not in link and "lib/lib" not in link


def test_cuda_home_chooses_the_toolkit(toolkit):
    def chosen(home):
        return subprocess.run(["scripts/deps.sh", "cuda"], cwd=toolkit.project.folder, env=ENVIRONMENT | {"CUDA_HOME": home},
                              capture_output=True, text=True, check=True).stdout.strip()
    assert chosen(str(toolkit.folder)) == str(toolkit.folder)
    assert chosen("/nowhere") == chosen("") != str(toolkit.folder)


# ---- make test and make check

REPORT = '<testsuites><testsuite><testcase name="a" classname="X"/>{}</testsuite></testsuites>'
FAILED = '<testcase name="b" classname="X"><failure message="no"/></testcase>'


class Suites:
    """`make test` with scripts in place of make and of the programs."""

    def __init__(self, folder):
        self.folder, self.make = folder, folder / "make"
        self.write(self.make, "")

    def write(self, path, script):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\nfor option; do case $option in --gtest_output=xml:*) report=${option#*xml:} ;; esac; done\n" + script)
        path.chmod(0o755)

    def program(self, name, script):
        self.write(self.folder / "build/test" / name, script)

    def run(self, *names):
        command = [sys.executable, "test/run_suites.py", "--build", self.folder / "build", "--make", self.make, *names]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * program.PATIENCE)


def passes(more=""):
    return f"echo '{REPORT.format(more)}' >$report\n"


@pytest.mark.parametrize("script, counts, says", [
    (passes(), "1 passed, 0 failed", ""),
    (passes(FAILED) + "exit 1", "1 passed, 1 failed", "FAILED X.b"),
    (passes('<testcase name="c" classname="X"><skipped message="no GPU"/></testcase>'), "1 passed, 0 failed, 1 skipped", "1 skipped: no GPU"),
    ("kill -SEGV $$", "0 passed, 1 failed", "FAILED killed by SIGSEGV"),
    ("true", "0 passed, 1 failed", "FAILED no report"),
    (passes() + "exit 3", "1 passed, 1 failed", "FAILED exit status 3"),
])
def test_the_last_line_counts(script, counts, says, tmp_path):
    suites = Suites(tmp_path)
    suites.program("cuda-runtime-plain", script)
    done = suites.run("cuda-runtime-plain")
    assert done.stdout.splitlines()[-1] == counts and says in done.stdout, done.stdout + done.stderr
    assert (done.returncode == 0) == (", 0 failed" in counts)


def test_programs_that_are_not_built_cost_only_their_suites(tmp_path):
    """Here the linker lacks a library of one group."""
    suites = Suites(tmp_path)
    suites.program("cuda-runtime-plain", passes())
    suites.write(suites.make, """
        [ $1 = programs-tests ] || exit 0
        echo '/usr/bin/ld: cannot find -lnothing: No such file or directory'
        echo 'collect2: error: ld returned 1 exit status' >&2
        echo 'make: *** [Makefile:319: build/test/unit] Error 1' >&2
        exit 2
        """)
    done = suites.run("unit", "more_unit", "cuda-runtime-plain")
    assert done.stdout.splitlines()[-1] == "1 passed, 3 failed" and done.returncode == 1, done.stdout + done.stderr
    assert ("error: the programs tests were not built: /usr/bin/ld: cannot find -lnothing: No such file or directory\n"
            "    FAILED without them: more_unit.1 more_unit.2 unit\n") in done.stdout


def test_a_suite_over_its_budget_is_named(capsys):
    suites = run_suites.table.find_suites("build", str)
    results = {suite.name: run_suites.Result(cpu=suite.needs.budget * (2 if suite.name == "resume" else 1)) for suite in suites}
    run_suites.show_over_budget(suites, results)
    assert capsys.readouterr().out == "CPU time over the budget in test/suites.py: resume 32 of 16 s\n"


def test_what_has_passed_is_not_run_again(tmp_path):
    file = tmp_path / "passed.json"
    run_suites.Earlier(file, "state").add({"a": run_suites.Result(passed=3), "b": run_suites.Result(failed=["x"])})
    assert run_suites.Earlier(file, "state").passed == {"a": [3, []]}
    assert run_suites.Earlier(file, "another").passed == {}


def test_check_of_a_changed_page(tmp_path):
    """In a repository of its own: a page with a retired term, then without, and the suites of its folder."""
    for name in ("test/check.py", "test/suites.py", "test/python/prose.py", "docs/terms.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())

    def run(*command):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)

    def checked():
        return run(sys.executable, "test/check.py", "--base", "HEAD", "echo", "RUN")

    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
        assert run("git", *command).returncode == 0
    assert "no file differs from HEAD" in checked().stdout
    page = pathlib.Path(tmp_path, "docs/data.md")
    page.write_text("A meet" + "ing of ranks.\n")
    assert checked().returncode == 1 and "is retired, say rendezvous" in checked().stdout
    page.write_text("A rendezvous of ranks.\n")
    assert checked().stdout.endswith("RUN documents options_page\n")
