# All commands of the project: `make help` lists them, `make` alone builds the trainer.
#
# A change of flags, sources or the git commit rebuilds exactly what depends on it. Variables:
#   CXXFLAGS=... LDFLAGS=...  added to the project's own flags
#   CXX=clang++               another compiler than g++; give it a BUILD folder of its own
#   WERROR=1                  warnings are errors, as in `make lint` and .ci/run
#   SANITIZE=1                with address and undefined-behaviour checks, in build-sanitize/
#   BUILD=folder              builds in this folder; the program is then FOLDER/train_gpt, except for build/
#   PYTHON=python3            the interpreter of the tests and the plot, with the modules of scripts/deps.sh
#   SUITE='unit mpi-2'        only these suites of `make test`
#   GPU_ARCH='80 89 90a'      the chips that nvcc compiles kernels for; by default this machine's GPUs, or these if it has none
#   CUDA=0                    leaves the GPU out; CUDA_HOME=folder is CUDA's toolkit
#   MPI=0                     without MPI: processes find one another over TCP (docs/launching.md)
#   V=1                       prints the commands

VERSION := 0.1.0
CXX := g++
JOBS ?= $(shell nproc)
PYTHON ?= $(shell scripts/deps.sh python)
SANITIZED := $(filter-out 0,$(SANITIZE))
BUILD ?= $(if $(SANITIZED),build-sanitize,build)
PROGRAM := $(if $(filter build,$(BUILD)),,$(BUILD)/)train_gpt
QUIET := $(if $(V),,@)

# Builds use every core, and each compiler's output stays together. A -j of the caller has precedence.
in_parallel = $(if $(findstring -j,$(MAKEFLAGS)),,--jobs=$(JOBS)) --output-sync=target
ifeq ($(MAKELEVEL)$(filter-out train_gpt test-programs clang-tidy,$(MAKECMDGOALS)),0)
MAKEFLAGS += --jobs=$(JOBS) --output-sync=target
endif
MAKEFLAGS += --no-print-directory --no-builtin-rules

# ---- Flags -----------------------------------------------------------------------------------------------

ifdef SANITIZED
# Some suites check for leaks (LEAK_CHECKS in test/run_suites.py). They ignore the leaks that test/leaks.txt
# lists.
export ASAN_OPTIONS ?= detect_leaks=0:detect_stack_use_after_return=1:strict_string_checks=1
export LSAN_OPTIONS ?= suppressions=$(CURDIR)/test/leaks.txt:print_suppressions=0
export UBSAN_OPTIONS ?= print_stacktrace=1
# Factor for all time limits of the tests: sanitized code is several times slower.
export PATIENCE ?= 5
OPTIMIZE := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow \
    -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS
else
OPTIMIZE := -O3
endif
# AVX2 and FMA on x86-64. The code assumes no newer processor; libraries choose at run time.
MACHINE := $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3)
CLANG := $(findstring clang,$(CXX))
# g++ 12 reports false overlaps and overflows in std::string and fmt (its bug 105651). clang++ warns of the signs
# that g++ leaves alone, and of loops that it does not vectorize.
WARNINGS := -Wall -Wextra -Wconversion -Wshadow \
    $(if $(CLANG),-Wno-sign-conversion -Wno-pass-failed,-Wno-restrict -Wno-stringop-overflow) $(if $(filter-out 0,$(WERROR)),-Werror)
# clang++ has OpenMP in a package of its own. Debian installs only one version of it at a time, which every version of
# clang++ can use. This is the folder of that version, if it is not the compiler's own.
LLVM_OPENMP := $(if $(CLANG),$(shell CXX='$(CXX)' scripts/deps.sh openmp))
OPENMP_CFLAGS := -fopenmp $(if $(LLVM_OPENMP),-isystem $(BUILD)/openmp)
OPENMP_LIBRARY := -fopenmp $(if $(LLVM_OPENMP),-L$(LLVM_OPENMP)/lib)
# Headers of other projects must give no warnings.
system_headers = $(patsubst -I%,-isystem %,$(shell pkg-config --cflags $(1) 2>/dev/null))
PACKAGES := fmt libutf8proc libxxhash tomlplusplus yaml-cpp
LIBRARY_CFLAGS := $(call system_headers,$(PACKAGES))
LIBRARIES := $(shell pkg-config --libs $(PACKAGES) 2>/dev/null) -ldnnl -lpthread
# Only one file uses MPI, through its C interface. Without MPI another file replaces it.
NO_MPI := $(filter 0,$(MPI))
ifndef NO_MPI
MPI_CFLAGS := -DOMPI_SKIP_MPICXX $(call system_headers,ompi-c)
MPI_LIBRARIES := $(shell pkg-config --libs ompi-c 2>/dev/null)
LIBRARIES := $(MPI_LIBRARIES) $(LIBRARIES)
endif
# For deps.sh.
export MPI

# g++ collects its own garbage only beyond 512 MiB, which few files need. Collecting took a tenth of the time.
COLLECTS := $(if $(CLANG),,--param ggc-min-heapsize=524288)
COMPILE = $(CXX) -std=c++20 $(OPTIMIZE) $(COLLECTS) $(MACHINE) -ffp-contract=fast -fno-math-errno $(OPENMP_CFLAGS) $(WARNINGS) \
    -I. $(LIBRARY_CFLAGS) $(CXXFLAGS)
LINK = $(CXX) $(OPTIMIZE) $(OPENMP_LIBRARY) $(LDFLAGS)
# `:=`, because a program may add its own libraries.
LINK_FLAGS := $(LINK) $(LIBRARIES)

# Outside a git checkout the commit is empty, and the program prints "unknown".
COMMIT := $(if $(wildcard .git),$(shell git describe --always --dirty --exclude='*' 2>/dev/null))
VERSION_FLAGS = -DLLMC_VERSION='"$(VERSION)"' -DLLMC_GPU_PART='"$(GPU_PART)"' $(if $(COMMIT),-DLLMC_COMMIT='"$(COMMIT)"')

# ---- Sources and objects ---------------------------------------------------------------------------------

# CUDA code is separate: dev/kernels.mk decides what the trainer links.
LIBRARY_SOURCES := $(filter-out llmc/device/cuda/% llmc/comm/nccl/% \
    llmc/comm/$(if $(NO_MPI),transport_mpi.cpp,transport_no_mpi.cpp),$(sort $(shell find llmc -name '*.cpp')))
CUDA_HOST_SOURCES := $(sort $(wildcard llmc/device/cuda/*.cpp llmc/comm/nccl/*.cpp))
UNIT_SOURCES := $(sort $(wildcard test/unit/*.cpp))
MPI_SOURCES := $(sort $(wildcard test/mpi/*.cpp))
# Each of these files is a separate program.
MPI_TOOL_SOURCES := $(sort $(wildcard test/mpi/tools/*.cpp))
PROBE_SOURCES := $(sort $(wildcard test/probe/*.cpp))
BENCH_SOURCES := $(sort $(wildcard dev/cpu/*.cpp))

objects = $(patsubst %,$(BUILD)/objects/%.o,$(basename $(1)))
LIBRARY := $(call objects,$(LIBRARY_SOURCES))
SOURCES := train_gpt.cu $(LIBRARY_SOURCES) $(CUDA_HOST_SOURCES) $(UNIT_SOURCES) $(MPI_SOURCES) $(MPI_TOOL_SOURCES) $(PROBE_SOURCES) \
    $(BENCH_SOURCES)
MPI_TOOLS := $(patsubst test/mpi/tools/%.cpp,$(BUILD)/test/tools/%,$(MPI_TOOL_SOURCES))
PROBES := $(patsubst test/probe/%.cpp,$(BUILD)/test/probe/%,$(PROBE_SOURCES))
BENCH := $(BUILD)/dev/bench_step
TEST_PROGRAMS := $(BUILD)/test/unit $(BUILD)/test/mpi $(MPI_TOOLS) $(PROBES) $(BENCH)

# $(call remember,FILE,VARIABLE): FILE holds the variable's value. A change of the value rebuilds what depends on
# FILE. (Without `strip`, make 4.3 takes some equal values for different ones.)
define remember
ifneq ($$(strip $$(file <$(1))),$$(strip $$($(2))))
.PHONY: $(1)
endif
$(1): export VALUE = $$($(2))
$(1):
	@mkdir -p $$(@D)
	@printf '%s\n' "$$$$VALUE" >$$@
endef
# $(call precompile,NAME,HEADER,COMMAND,FLAGS FILE,OBJECTS): OBJECTS, which COMMAND compiles, use a precompiled
# HEADER. A file whose own flags do not allow this includes the header itself. (With ccache and with clang++,
# nothing is precompiled.)
define precompile
$(BUILD)/precompiled/$(1)/$(notdir $(2)): $(2) dev/precompiled.h $(4) | $(BUILD)/libraries.ok
	@echo 'precompile $(2) ($(1))'
	@mkdir -p $$(@D)
	@echo '#include "$(2)"' >$$@
	$(QUIET)$(3) -x c++-header -c $$@ -o $$@.gch || { rm $$@; exit 1; }
$(5): $(BUILD)/precompiled/$(1)/$(notdir $(2))
$(5): PRECOMPILED = -include $(BUILD)/precompiled/$(1)/$(notdir $(2))
endef
PRECOMPILES := $(if $(findstring ccache,$(CXX))$(CLANG),,yes)
$(eval $(call remember,$(BUILD)/flags.txt,COMPILE))
$(eval $(call remember,$(BUILD)/link.txt,LINK_FLAGS))
# A program is linked again if one of its objects was removed from the list.
$(eval $(call remember,$(BUILD)/library.txt,LIBRARY))
$(eval $(call remember,$(BUILD)/unit.txt,UNIT_SOURCES))
$(eval $(call remember,$(BUILD)/mpi.txt,MPI_SOURCES))
$(eval $(call remember,$(BUILD)/bench.txt,BENCH_SOURCES))
$(eval $(call remember,$(BUILD)/mpi-or-not.txt,NO_MPI))

include dev/kernels.mk
include dev/gpu/check.mk
$(eval $(call remember,$(BUILD)/version.txt,VERSION_FLAGS))

# ---- Commands --------------------------------------------------------------------------------------------

.DEFAULT_GOAL := train_gpt
.PHONY: help deps deps-gpu quickstart test check test-more test-long test-matrix test-programs bench-cpu bench-mpi bench-zero bench-optimizers bench-pipeline bench bench-check gpu-check bench-gpu-check bundle \
    docs pictures lint check-format check-shell check-python check-prose clang-tidy format clean
.DELETE_ON_ERROR:

help:  ## this list
	@echo 'make TARGET, where TARGET is one of (`make` alone is `make train_gpt`):'
	@sed -n 's/^\([a-z_-]*\):.*  ## /\1@/p' Makefile dev/gpu/check.mk | awk -F@ '{ printf "  %-15s %s\n", $$1, $$2 }'
	@echo 'with variables such as:'
	@sed -n '4,15s/^# //p' Makefile

deps:  ## installs what is missing (Debian, Ubuntu), after saying what that is
	@CXX='$(CXX)' scripts/deps.sh

deps-gpu:  ## installs what `--attention cudnn` needs to be built: the headers of cuDNN's frontend, into .cuda/
	@scripts/deps.sh gpu

# The objects that take longest to compile begin first.
$(PROGRAM): $(GPU_OBJECTS) $(BUILD)/objects/train_gpt.o $(LIBRARY) $(BUILD)/gpu.txt
$(PROGRAM): LIBRARIES += $(GPU_LIBRARIES)
ifneq ($(PROGRAM),train_gpt)
.PHONY: train_gpt
train_gpt: $(PROGRAM)  ## the trainer, ./train_gpt
endif

quickstart:  ## from nothing to a trained GPT: deps, builds, trains with 2 processes, draws its loss
	@CXX='$(CXX)' scripts/deps.sh train
	@printf '\n== Building ./train_gpt\n'
	@$(MAKE) $(in_parallel) train_gpt
	@printf '\n== Training a small GPT with 2 processes on stories that the program makes up\n'
	@$(dir $(PROGRAM))train_gpt --processes 2 --out-dir runs/quickstart --resume-if-any
	@printf '\n== Drawing its loss\n'
	@$(PYTHON) scripts/plot.py runs/quickstart
	@printf '\nDone. In runs/quickstart: %s\n' "$$(cd runs/quickstart && ls -m)"
	@printf 'The loss curve is runs/quickstart/loss.png. The options for a run of your own: '
	@printf './train_gpt --help\n'

docs: $(PROGRAM)  ## docs/options.md, from what ./train_gpt --help prints
	@$(PYTHON) dev/docs/options_page.py $(dir $(PROGRAM))train_gpt

# If runs/quickstart has metrics, even of a run that was stopped, it is not trained again.
pictures:  ## the pictures of README.md: the loss of the quickstart, which trains if it has not, and the folders of llmc/
	@[ -e runs/quickstart/metrics.jsonl ] || $(MAKE) quickstart
	@$(PYTHON) dev/docs/loss_picture.py runs/quickstart
	@$(PYTHON) dev/docs/architecture.py

# It builds what the suites need, group by group: the targets programs-NAME.
RUN_SUITES = $(PYTHON) test/run_suites.py --build $(BUILD) --program $(PROGRAM) --make '$(MAKE) --jobs=$(JOBS) --output-sync=target' \
    --without '$(if $(SIMT_KINDS),,simt) $(if $(RUNTIME_KINDS),,runtime)'
test: deps-of-tests  ## from nothing to all tests passed: deps, builds, runs every suite of this tier; the last line counts the tests
	@$(RUN_SUITES) $(SUITE)

check:  ## format and lint of what has changed since the commit BASE (default: HEAD), and the suites of the changed folders
	@$(PYTHON) test/check.py --base '$(or $(BASE),HEAD)' $(RUN_SUITES)

test-more: deps-of-tests  ## the suites that `make test` has no time for: ThreadSanitizer, the kernel lab, deeper simulated meshes
	@$(RUN_SUITES) --tier more $(SUITE)

test-long: deps-of-tests  ## the suites that take hours; goes on where it was interrupted
	@$(RUN_SUITES) --tier long $(SUITE)

test-matrix: deps-of-tests  ## every combination of ZeRO, pipeline, recompute and accumulation that fits 8 processes
	@$(RUN_SUITES) --tier long 'matrix-*'

# A command that counts tests also ends with a count if packages cannot be installed.
deps-of-tests:
	@CXX='$(CXX)' scripts/deps.sh || { echo '0 passed, 1 failed'; exit 1; }

.PHONY: deps-of-tests programs-trainer programs-tests programs-simulated programs-kernels programs-more programs-long
programs-trainer: $(PROGRAM)
programs-tests: $(TEST_PROGRAMS)
programs-simulated: $(RUNTIME_TESTS) $(SIMULATED_PROGRAMS)
programs-kernels: $(filter-out %-thread,$(KERNEL_TESTS) $(CHECKED_OPS)) $(KERNEL_REPORT)
programs-more: $(filter %-thread,$(KERNEL_TESTS) $(CHECKED_OPS)) $(LAB_TESTS) $(LAB_REPORT) $(SIMULATED_PROBES) $(TESTED_OF_BUNDLE)
programs-long: $(LONG_PROGRAMS)
	@:

test-programs: programs-trainer programs-tests programs-simulated programs-kernels programs-more  ## builds what `make test` and `make test-more` run
	@:

# TORCH_PYTHON=python names one more interpreter, with a newer PyTorch; BENCH_OPTIONS go to dev/cpu/bench_cpu.py.
# LLAMA_PYTHON=python names one with PyPI's xllamacpp; GENERATION_OPTIONS go to dev/cpu/bench_generation.py.
bench-cpu: deps  ## times the training step by operation, PyTorch's step beside it, and generation beside llama.cpp's
	@$(MAKE) $(in_parallel) $(BENCH) train_gpt
	@$(PYTHON) dev/cpu/bench_cpu.py $(BENCH) $(BENCH_OPTIONS)
	@$(PYTHON) dev/cpu/bench_generation.py $(dir $(PROGRAM))train_gpt $(BENCH) $(GENERATION_OPTIONS)

# BENCH_OPTIONS go to dev/cpu/bench_mpi.py.
bench-mpi: deps  ## times the training step on 1, 2 and 4 processes, and what overlapping communication saves
	@$(MAKE) $(in_parallel) train_gpt
	@$(PYTHON) dev/cpu/bench_mpi.py $(dir $(PROGRAM))train_gpt $(BENCH_OPTIONS)

# BENCH_OPTIONS go to dev/cpu/bench_zero.py.
bench-zero: deps  ## times the training step at each stage of ZeRO, with what a process holds and sends
	@$(MAKE) $(in_parallel) train_gpt
	@$(PYTHON) dev/cpu/bench_zero.py $(dir $(PROGRAM))train_gpt $(BENCH_OPTIONS)

# BENCH_OPTIONS go to dev/cpu/bench_optimizers.py. It takes about half an hour.
bench-optimizers: deps  ## compares AdamW and Muon on the generated stories, by tokens and by seconds
	@$(MAKE) $(in_parallel) train_gpt
	@$(PYTHON) dev/cpu/bench_optimizers.py $(dir $(PROGRAM))train_gpt $(BENCH_OPTIONS)

# BENCH_OPTIONS go to dev/cpu/bench_pipeline.py.
bench-pipeline: deps  ## times pipelines of 2 and 4 stages, and compares them with their simulation
	@$(MAKE) $(in_parallel) train_gpt
	@$(PYTHON) dev/cpu/bench_pipeline.py $(dir $(PROGRAM))train_gpt $(BENCH_OPTIONS)

# The timings need a GPU. If cuDNN is installed, it is timed together with attention.
bench: deps  ## times every kernel of the lab (dev/) on this machine's GPU, into dev/results/
	@$(demand_gpu)
	$(get_cudnn_frontend)
	@$(MAKE) $(in_parallel) $(BUILD)/gpu/kernels
	@rm -f $(BUILD)/gpu/timings.jsonl
	@$(BUILD)/gpu/kernels --time $(BUILD)/gpu/timings.jsonl
	@$(PYTHON) dev/lab/report.py $(BUILD)/gpu/timings.jsonl dev/results

bench-check: deps  ## runs every kernel of the lab (dev/) on the CPU, to see that it computes what it should
	@$(MAKE) $(in_parallel) $(LAB_CHECK) $(LAB_REPORT)
	@KERNEL_REPORT=$(LAB_REPORT) $(LAB_CHECK)

# Versions are pinned: another clang-format formats differently, and another clang-tidy finds more, or less.
CLANG_FORMAT := clang-format-14
# It has no omp.h, so it may take that of g++. Deprecated functions of the standard library are used by its own headers.
CLANG_TIDY = $(shell scripts/deps.sh clang-tidy) --quiet $< -- -x c++ -std=c++20 $(MACHINE) -I. $(LIBRARY_CFLAGS) \
    -idirafter $(shell g++ -print-file-name=include) -Wno-deprecated-declarations
CPP_FILES = train_gpt.cu $(sort $(shell find llmc dev test -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'))
# In a folder of its own, so that what is built elsewhere, with other flags, stays.
lint:  ## checks warnings, formatting, clang-tidy, shellcheck, pyflakes (installs them where missing)
	@CXX='$(CXX)' scripts/deps.sh lint
	@$(MAKE) --keep-going $(in_parallel) WERROR=1 BUILD=$(BUILD)/lint check-format check-shell check-python check-prose clang-tidy

# The quick checks are tests too: test/python/test_lint.py.
check-format:  ## part of lint: clang-format
	$(QUIET)$(CLANG_FORMAT) --dry-run -Werror $(CPP_FILES)
check-shell:  ## part of lint: shellcheck
	$(QUIET)shellcheck .ci/run scripts/slurm.sbatch $(wildcard scripts/*.sh test/*.sh dev/*/*.sh)
check-prose:  ## part of lint: retired terms (docs/terms.md), and long lines
	$(QUIET)$(PYTHON) test/python/prose.py
check-python:  ## part of lint: pyflakes
	$(QUIET)$(PYTHON) -m pyflakes $(wildcard data/*.py scripts/*.py dev/*.py dev/*/*.py test/*.py test/*/*.py)

# clang-tidy reads CUDA's files only if the headers they need are installed.
UNREAD := $(if $(CUDNN_FRONTEND),,$(CUDNN_SOURCES)) $(filter-out %/no_cuda.cpp %/no_nccl.cpp \
    $(if $(CUBLASLT_HEADER),llmc/device/cuda/%) $(if $(and $(CUBLASLT_HEADER),$(NCCL_HEADER)),llmc/comm/nccl/%),$(CUDA_HOST_SOURCES))
# With BASE=COMMIT, only of what has changed since that commit.
OF_TIDY = $(patsubst %,$(BUILD)/lint/%,$(basename $(filter-out $(UNREAD),$(SOURCES)))) $(KERNEL_LINT)
CHANGED_SOURCES = $(basename $(shell $(PYTHON) test/check.py --sources --base $(BASE)))
clang-tidy: $(if $(and $(BASE),$(filter clang-tidy,$(MAKECMDGOALS))),$(filter $(foreach folder,lint simt-lint,$(patsubst %,$(BUILD)/$(folder)/%,$(CHANGED_SOURCES))),$(OF_TIDY)),$(OF_TIDY))  ## part of lint: clang-tidy
	$(if $(strip $(UNREAD)),@echo 'clang-tidy skips files because headers of CUDA or cuDNN are missing: $(strip $(UNREAD))')

format:  ## clang-format on every C++ file
	$(QUIET)$(CLANG_FORMAT) -i $(CPP_FILES)

clean:  ## removes what was built (not runs/)
	rm -rf build build-sanitize train_gpt $(LAB_PROGRAMS)

# ---- Building --------------------------------------------------------------------------------------------

$(BUILD)/test/unit: $(call objects,$(UNIT_SOURCES)) $(LIBRARY) $(NO_GPU_OBJECTS) $(BUILD)/unit.txt
$(BUILD)/test/mpi: $(call objects,$(MPI_SOURCES)) $(LIBRARY) $(NO_GPU_OBJECTS) $(BUILD)/mpi.txt
$(MPI_TOOLS): $(BUILD)/test/tools/%: $(BUILD)/objects/test/mpi/tools/%.o $(LIBRARY) $(NO_GPU_OBJECTS)
$(PROBES): $(BUILD)/test/probe/%: $(BUILD)/objects/test/probe/%.o $(LIBRARY)
# The probes that also run on a GPU.
PROBES_ON_GPU := $(filter %/model_probe %/op_check,$(PROBES))
$(filter-out $(PROBES_ON_GPU),$(PROBES)): $(NO_GPU_OBJECTS)
$(PROBES_ON_GPU): $(GPU_OBJECTS)
$(PROBES_ON_GPU): LIBRARIES += $(GPU_LIBRARIES)
$(BUILD)/test/unit: LIBRARIES += -lgtest_main -lgtest
$(BUILD)/test/mpi: LIBRARIES += -lgtest
$(BENCH): $(call objects,$(BENCH_SOURCES)) $(LIBRARY) $(NO_GPU_OBJECTS) $(BUILD)/bench.txt

$(PROGRAM) $(TEST_PROGRAMS): $(BUILD)/library.txt $(BUILD)/link.txt
	@echo 'link $@$(if $(filter $(PROGRAM),$@), with $(GPU_PART))'
	@mkdir -p $(@D)
	$(QUIET)$(LINK) $(filter %.o,$^) $(LIBRARIES) -o $@

$(BUILD)/objects/%.o: %.cpp $(BUILD)/flags.txt | $(BUILD)/libraries.ok
	$(compile_object)
$(BUILD)/objects/%.o: %.cu $(BUILD)/flags.txt | $(BUILD)/libraries.ok
	$(compile_object)

define compile_object
@echo 'compile $<'
@mkdir -p $(@D)
$(QUIET)$(COMPILE) $(FILE_FLAGS) $(PRECOMPILED) -MMD -MP -x c++ -c $< -o $@
endef

# A file is checked again whenever its object was compiled again, for example after a change of a header.
$(BUILD)/lint/%: %.cpp $(BUILD)/objects/%.o .clang-tidy
	$(check_file)
$(BUILD)/lint/%: %.cu $(BUILD)/objects/%.o .clang-tidy
	$(check_file)

# clang does not know all attributes of g++.
define check_file
@echo 'clang-tidy $<'
@mkdir -p $(@D)
$(QUIET)$(CLANG_TIDY) -Wno-ignored-attributes $(FILE_FLAGS) 2>$@.log || { cat $@.log; exit 1; }
@touch $@
endef

ifdef SANITIZED
# With use-after-return detection, g++ 12 misaligns variables that become AVX-512 vectors, and the program crashes.
$(BUILD)/objects/llmc/device/cpu/%.o: FILE_FLAGS = --param asan-use-after-return=0
endif

# What runs once a start compiles in half the time with -Og. So do the tests themselves, not the code under test. -Og
# makes no fma and no vectors, so nothing here computes a run's numbers, a plan's times or a whole data set.
OF_TESTS := $(filter $(BUILD)/objects/test/%,$(call objects,$(SOURCES)))
# Files of llmc/train that run at every step, compute its numbers, or that a search calls.
OFTEN := $(patsubst %,llmc/train/%.cpp,diagnosis evaluator fp8_scaling generate hellaswag loss_scale run_spec token_choice trainer)
ONCE := $(call objects,train_gpt.cu $(filter-out $(OFTEN),$(wildcard llmc/train/*.cpp)) $(addprefix llmc/, \
    $(addprefix data/,chat_format data_record known_chat_formats prompt shard_names) \
    $(addprefix io/,checkpoint find_checkpoints foreign_files metrics stored_tensors tensor_names tokenizer_folder) \
    $(addprefix model/,check_lists check_model config_json derive_lists derive_rows family family_options gpt2 llama model nanochat placing \
        rope_choices trace) parallel/step/step_text \
    $(addprefix planner/,config_tree configure described_models foreign_config foreign_options plan_command plan_json plan_options \
        plan_report print_command) timeline/pipeline_timeline))
$(OF_TESTS) $(ONCE): FILE_FLAGS = -Og
ifdef PRECOMPILES
$(eval $(call precompile,objects,dev/precompiled.h,$(COMPILE),$(BUILD)/flags.txt,$(filter-out $(OF_TESTS) $(ONCE),$(call objects,$(SOURCES)))))
$(eval $(call precompile,once,dev/precompiled.h,$(COMPILE) -Og,$(BUILD)/flags.txt,$(ONCE)))
$(eval $(call precompile,tests,test/precompiled.h,$(COMPILE) -Og,$(BUILD)/flags.txt,$(OF_TESTS)))
endif
$(BUILD)/objects/llmc/device/cuda/% $(BUILD)/objects/llmc/comm/nccl/%: FILE_FLAGS = $(CUDA_INCLUDES)
$(BUILD)/lint/llmc/device/cuda/% $(BUILD)/lint/llmc/comm/nccl/%: FILE_FLAGS = $(CUDA_INCLUDES)
# The frontend's templates compile slowly, and their speed does not matter. Graphs as JSON, which nothing here reads,
# would double the time.
$(BUILD)/objects/llmc/device/cuda/cudnn_attention.o: FILE_FLAGS = $(CUDA_INCLUDES) -Og -DCUDNN_FRONTEND_SKIP_JSON_LIB
$(filter-out $(NO_GPU_OBJECTS),$(call objects,$(CUDA_HOST_SOURCES))): $(BUILD)/cuda-flags.txt
$(BUILD)/objects/llmc/comm/transport_mpi.o: FILE_FLAGS = $(MPI_CFLAGS)
$(BUILD)/lint/llmc/comm/transport_mpi: FILE_FLAGS = $(MPI_CFLAGS)

# The commit is in one object, so a new commit compiles one small file and links.
$(BUILD)/objects/llmc/core/version.o: FILE_FLAGS = $(VERSION_FLAGS)
$(BUILD)/objects/llmc/core/version.o: $(BUILD)/version.txt

# Checks for missing libraries once, and again if the flags change. A missing one then gives one clear line instead of
# a page of compiler errors.
$(BUILD)/libraries.ok: $(BUILD)/flags.txt $(BUILD)/mpi-or-not.txt
	$(eval missing := $(shell MPI='$(MPI)' CXX='$(CXX)' CXXFLAGS='$(CXXFLAGS)' LDFLAGS='$(LDFLAGS)' scripts/deps.sh missing))
	$(if $(missing),$(error missing: $(missing); run `make deps`$(if $(findstring openmpi,$(missing)), \
	    or `make MPI=0` to do without MPI)))
	$(if $(LLVM_OPENMP),@mkdir -p $(BUILD)/openmp && ln -sf $(firstword $(wildcard $(LLVM_OPENMP)/lib/clang/*/include/omp.h)) $(BUILD)/openmp/)
	@touch $@

-include $(patsubst %.o,%.d,$(call objects,$(SOURCES)))
