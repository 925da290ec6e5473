# The kernels' tests and the kernel lab, for the Makefile. Each kernel test and each dev/X.cu is compiled
# - by g++, for the executor of test/simt: plain, and with the checks of two sanitizers,
# - by nvcc, for GPUs, if CUDA's compiler is installed. Its report of registers and spills is kept.

# The folder of CUDA's headers, and of nvcc if it has bin/nvcc: CUDA_HOME, or the folder that scripts/deps.sh
# finds.
CUDA_FOLDER := $(shell CUDA_HOME='$(CUDA_HOME)' scripts/deps.sh cuda)
NVCC := $(wildcard $(CUDA_FOLDER)/bin/nvcc)
# $(call cuda_header,NAME,LIBRARY) and $(call cuda_library,LIBRARY) find a file in the toolkit, beside it, or
# in the system. PyPI's packages put it beside the toolkit, and name libraries only with a version.
cuda_header = $(firstword $(wildcard $(patsubst %,%/$(1),$(CUDA_FOLDER)/include $(CUDA_FOLDER)/../$(2)/include /usr/include)))
cuda_library = $(abspath $(firstword $(wildcard $(foreach folder,$(CUDA_FOLDER)/lib64 $(CUDA_FOLDER)/lib $(CUDA_FOLDER)/../$(1)/lib \
    $(wildcard /usr/lib/*-linux-gnu) /usr/lib64,$(folder)/lib$(1).so $(folder)/lib$(1).so.*))))
NCCL_HEADER := $(call cuda_header,nccl.h,nccl)
CUDNN_HEADER := $(call cuda_header,cudnn.h,cudnn)
CUBLASLT_HEADER := $(wildcard $(CUDA_FOLDER)/include/cublasLt.h)
# cuDNN's frontend has only headers: those of `make deps-gpu`, of the toolkit, of the system, or of Python's
# package.
FRONTEND_OF_PYTHON = $(shell $(PYTHON) -c 'import importlib.metadata as m; print(next(f.locate().resolve() for f in \
    m.files("nvidia-cudnn-frontend") if f.name == "cudnn_frontend.h"))' 2>/dev/null)
CUDNN_FRONTEND := $(if $(CUDNN_HEADER),$(or $(firstword $(wildcard $(patsubst %,%/include/cudnn_frontend.h,.cuda $(CUDA_FOLDER) /usr))),\
    $(FRONTEND_OF_PYTHON)))
CUDA_INCLUDES := $(patsubst %/,-isystem %,$(CUDA_FOLDER)/include/ $(filter-out /usr/include/ $(CUDA_FOLDER)/include/,\
    $(sort $(dir $(NCCL_HEADER) $(CUDNN_HEADER) $(CUDNN_FRONTEND)))))
# For targets that can do without it.
get_cudnn_frontend = $(if $(CUDNN_FRONTEND),,@$(if $(CUDNN_HEADER),scripts/deps.sh gpu optional,echo 'warning: no cudnn.h here; going on \
    without cuDNN' >&2))

# The chips to compile for, such as 90a. Code for 90a has Hopper's own instructions, which no other chip has.
# Code for sm_80 also runs on sm_86 and sm_89, but converts to 8 bits by arithmetic, where sm_89 has instructions.
# The default is this machine's chips, if the kernels run on any of them.
GPU := $(firstword $(wildcard /dev/nvidia[0-9]*))
demand_gpu = $(if $(GPU),,echo 'error: no GPU here (no /dev/nvidia0 or other); `make bench-check` runs the kernels on the CPU' >&2; exit 1)
ifndef GPU_ARCH
OWN_CHIPS := $(if $(GPU),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    sed -n 's/^\([89]\|1[0-9]\)\.\([0-9]\)$$/\1\2/p'))
GPU_ARCH := $(or $(sort $(OWN_CHIPS:90=90a)),80 89 90a)
# PTX for future chips, which cannot run 90a's code.
GPU_PTX := $(if $(OWN_CHIPS),,90)
endif
# sm_80 to sm_129, including those with chip-specific (a) or family-specific (f) instructions.
CHIPS := $(foreach tens,8 9 10 11 12,$(foreach unit,0 1 2 3 4 5 6 7 8 9,$(patsubst %,$(tens)$(unit)%,a f) $(tens)$(unit)))
ifneq (,$(if $(strip $(GPU_ARCH)),$(filter-out $(CHIPS),$(GPU_ARCH)),none))
$(error GPU_ARCH='$(GPU_ARCH)': the kernels take sm_80 and later; give the chips' numbers, such as GPU_ARCH='80 89 90a')
endif

# The trainer's GPU part: built if nvcc and cuBLASLt are found, unless CUDA=0 excludes it.
CUBLASLT := $(call cuda_library,cublasLt)
CUDART := $(firstword $(wildcard $(CUDA_FOLDER)/lib64/libcudart_static.a $(CUDA_FOLDER)/lib/libcudart_static.a))
WITHOUT_CUDA := $(strip $(if $(filter 0,$(CUDA)),CUDA=0,$(if $(NVCC),$(if $(and $(CUBLASLT_HEADER),$(CUBLASLT),$(CUDART)),,no cuBLASLt \
    here),no nvcc here)))
WITH_CUDA := $(if $(WITHOUT_CUDA),,yes)
NCCL := $(and $(WITH_CUDA),$(NCCL_HEADER),$(call cuda_library,nccl))
GPU_SOURCES := $(sort $(wildcard llmc/device/cuda/*.cu))
# The host code for a GPU. Each part has a replacement, no_X.cpp, for programs without it.
CUDNN_SOURCES := llmc/device/cuda/cudnn_attention.cpp
CUBLASLT_SOURCE := llmc/device/cuda/cublaslt_library.cpp
CUDNN_HOST := $(if $(CUDNN_FRONTEND),$(CUDNN_SOURCES),llmc/device/cuda/no_cudnn.cpp)
CUDA_HOST := $(filter-out $(CUDNN_SOURCES) %/no_cuda.cpp %/no_cudnn.cpp %/no_nccl.cpp %/nccl_communicator.cpp,$(CUDA_HOST_SOURCES)) \
    $(CUDNN_HOST) llmc/comm/nccl/$(if $(NCCL),nccl_communicator,no_nccl).cpp
NO_GPU_OBJECTS = $(call objects,llmc/device/cuda/no_cuda.cpp llmc/comm/nccl/no_nccl.cpp)
ifdef WITH_CUDA
comma := ,
CUDA_VERSION := $(shell awk '/^.define CUDART_VERSION / { printf "%d.%d", $$3 / 1000, $$3 % 1000 / 10 }' \
    $(CUDA_FOLDER)/include/cuda_runtime_api.h)
GPU_PART := CUDA $(CUDA_VERSION) for $(GPU_ARCH:%=sm_%)$(if $(GPU_PTX), and later)$(comma) $(if $(NCCL),,no )NCCL$(comma) \
    $(if $(CUDNN_FRONTEND),,no )cuDNN
GPU_OBJECTS = $(call nvcc_objects,$(GPU_SOURCES)) $(call objects,$(CUDA_HOST))
# cuBLASLt and cuDNN are loaded when needed; this folder is searched too.
GPU_LIBRARIES := $(NCCL) $(CUDART) -ldl -lrt $(patsubst %/,-Wl$(comma)-rpath$(comma)%,$(sort $(dir $(CUBLASLT) $(NCCL) \
    $(if $(CUDNN_FRONTEND),$(call cuda_library,cudnn)))))
else
GPU_PART := no CUDA ($(WITHOUT_CUDA))
GPU_OBJECTS = $(NO_GPU_OBJECTS)
endif
# Needed before the list of linked objects is compared with that of the last build.
nvcc_objects = $(patsubst %,$(BUILD)/nvcc/%.o,$(basename $(1)))
GPU_LINK = $(GPU_OBJECTS) $(GPU_LIBRARIES)
$(eval $(call remember,$(BUILD)/gpu.txt,GPU_LINK))
$(eval $(call remember,$(BUILD)/cuda-flags.txt,CUDA_INCLUDES))

LAB_SOURCES := $(sort $(wildcard dev/*.cu))
LAB_PROGRAMS := $(basename $(LAB_SOURCES))
LAB_COMMON := $(filter-out dev/lab/main.cpp dev/lab/no_gpu.cpp,$(sort $(wildcard dev/lab/*.cpp)))
LAB_TEST_SOURCES := $(sort $(wildcard test/lab/*.cpp))
# The main program is that of the lab's tests too.
KERNEL_MAIN := test/kernels/kernels_main.cpp
KERNEL_TEST_SOURCES := $(filter-out $(KERNEL_MAIN),$(sort $(wildcard test/kernels/*.cpp)))
# Tests of the executor itself, never built for a GPU.
SIMT_TEST_SOURCES := $(sort $(wildcard test/simt/*_test.cpp))
SIMT_SOURCES := $(filter-out $(SIMT_TEST_SOURCES),$(sort $(wildcard test/simt/*.cpp)))

# ---- On the executor -------------------------------------------------------------------------------------

# AddressSanitizer and ThreadSanitizer exclude each other, and a build with SANITIZE=1 already has one. The checked kinds
# find all that the plain kind would find. The plain kind is the fastest, and runs many orders of the threads
# in `make test-long`.
SIMT_KINDS := $(if $(SANITIZED),,plain address thread)
KERNEL_TESTS := $(patsubst %,$(BUILD)/test/kernels-%,$(filter-out plain,$(SIMT_KINDS)))
LAB_TESTS := $(patsubst %,$(BUILD)/test/lab-%,$(filter-out plain,$(SIMT_KINDS)))
LONG_PROGRAMS := $(if $(filter plain,$(SIMT_KINDS)),$(BUILD)/test/kernels-plain $(BUILD)/test/lab-plain)
# The program that `make bench-check` runs: one that `make test-more` builds, if there is one.
LAB_CHECK := $(BUILD)/test/lab-$(if $(SANITIZED),plain,address)
# Fills unset local variables with a pattern, which reads as a large number or NaN; without it they would
# often be 0.
UNSET := -ftrivial-auto-var-init=pattern
CHECKS_plain := -O2 $(UNSET)
# -Og compiles in half the time of -O1, and the code is as fast. Some checks of undefined behavior are left
# out: they double the time again and find nothing in kernels. With an initial pattern and checks, g++ warns
# of variables in fmt that are in fact set; the thread kind keeps that warning.
CHECKS_address := -Og -g1 $(UNSET) -Wno-uninitialized -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=null,vptr,object-size \
    -fno-sanitize-recover=all
CHECKS_thread := -Og -g1 -fsanitize=thread
DEFINE_address := -DSIMT_ADDRESS
DEFINE_thread := -DSIMT_THREAD

# The lab's GPU, and the libraries it is compared with.
LAB_ON_GPU := dev/lab/gpu.cu dev/lab/rivals.cu dev/lab/matmul_rival.cu dev/lab/rivals_cudnn.cu
# The trainer's products by cuBLASLt, one of the rivals, and the kernel that compares their results.
LT_PRODUCTS := llmc/device/cuda/lt_products.cpp $(CUBLASLT_SOURCE) llmc/device/cuda/cuda_streams.cpp
CHECKSUM := llmc/device/cuda/checksum.cu
ON_GPU := $(LAB_SOURCES) $(LAB_COMMON) $(LAB_ON_GPU) $(CHECKSUM) $(KERNEL_MAIN) $(KERNEL_TEST_SOURCES) $(LAB_TEST_SOURCES)

# The two programs for the executor, and what both have.
IN_BOTH := $(SIMT_SOURCES) $(LAB_COMMON) dev/lab/no_gpu.cpp $(KERNEL_MAIN)
OF_KERNEL_TESTS := $(CHECKSUM) $(KERNEL_TEST_SOURCES) $(SIMT_TEST_SOURCES)
OF_LAB_TESTS := $(LAB_SOURCES) $(LAB_TEST_SOURCES)
KERNEL_LIST := $(IN_BOTH) $(OF_KERNEL_TESTS) $(OF_LAB_TESTS)

# CUDA's headers break strict aliasing.
SIMT_COMPILE = $(CXX) -std=c++20 $(COLLECTS) $(MACHINE) -fno-strict-aliasing -fno-math-errno $(WARNINGS) -Wno-unknown-pragmas \
    -I. -Itest $(CUDA_INCLUDES) $(LIBRARY_CFLAGS) $(CXXFLAGS)
SIMT_FLAGS = $(SIMT_COMPILE) $(foreach kind,$(SIMT_KINDS),$(CHECKS_$(kind)))
$(eval $(call remember,$(BUILD)/simt-flags.txt,SIMT_FLAGS))
$(eval $(call remember,$(BUILD)/kernels.txt,KERNEL_LIST))
simt_objects = $(patsubst %,$(BUILD)/simt/$(1)/%.o,$(basename $(2)))

define simt_kind
# The executor's own code is unchecked in every kind; it only tells the sanitizers about its fibers. The lab's
# common files have no kernels, so they are unchecked too.
$(call simt_objects,$(1),$(SIMT_SOURCES)): CHECKS := -O2 $(DEFINE_$(1))
$(call simt_objects,$(1),$(LAB_COMMON) dev/lab/no_gpu.cpp dev/lab/main.cpp): CHECKS := -Og $(DEFINE_$(1))
$(call simt_objects,$(1),$(KERNEL_MAIN) $(OF_KERNEL_TESTS) $(OF_LAB_TESTS)): CHECKS := $(CHECKS_$(1)) $(DEFINE_$(1))
$(BUILD)/simt/$(1)/%.o: %.cpp $(BUILD)/simt-flags.txt | $(BUILD)/libraries.ok
	$$(compile_simt)
$(BUILD)/simt/$(1)/%.o: %.cu $(BUILD)/simt-flags.txt | $(BUILD)/libraries.ok
	$$(compile_simt)
$(BUILD)/test/kernels-$(1): $(call simt_objects,$(1),$(OF_KERNEL_TESTS))
$(BUILD)/test/lab-$(1): $(call simt_objects,$(1),$(OF_LAB_TESTS))
$(BUILD)/test/kernels-$(1) $(BUILD)/test/lab-$(1): $(call simt_objects,$(1),$(IN_BOTH)) $(LIBRARY) $(NO_GPU_OBJECTS) $(BUILD)/library.txt \
    $(BUILD)/link.txt $(BUILD)/kernels.txt
	$$(link_simt) $(CHECKS_$(1)) $$(filter %.o,$$^) $$(LIBRARIES) -lboost_context -lgtest -o $$@
-include $(patsubst %.o,%.d,$(call simt_objects,$(1),$(KERNEL_LIST) dev/lab/main.cpp))
endef

define compile_simt
@echo 'compile $< ($(firstword $(subst /, ,$(@:$(BUILD)/simt/%=%))))'
@mkdir -p $(@D)
$(QUIET)$(SIMT_COMPILE) $(CHECKS) $(PRECOMPILED) -MMD -MP -x c++ -c $< -o $@
endef

# Symbols are exported, since kernels are identified by them.
define link_simt
@echo 'link $@'
@mkdir -p $(@D)
$(QUIET)$(CXX) $(or $(EXPORTS),-rdynamic) $(OPENMP_LIBRARY) $(LDFLAGS)
endef
$(foreach kind,$(or $(SIMT_KINDS),plain),$(eval $(call simt_kind,$(kind))))

include test/simt/runtime.mk

ifdef PRECOMPILES
$(foreach kind,$(SIMT_KINDS),$(eval $(call precompile,$(kind),test/precompiled.h,$(SIMT_COMPILE) $(CHECKS_$(kind)) $(DEFINE_$(kind)),\
    $(BUILD)/simt-flags.txt,$(call simt_objects,$(kind),$(KERNEL_MAIN) $(filter-out $(CHECKSUM),$(OF_KERNEL_TESTS)) $(OF_LAB_TESTS) \
    $(if $(filter $(kind),$(RUNTIME_KINDS)),$(RUNTIME_TEST_SOURCES) $(RUNTIME_RIVALS) $(SIMULATED_CUDA))))))
endif

# clang-tidy reads the kernels as the executor compiles them.
KERNEL_LINT := $(patsubst %,$(BUILD)/simt-lint/%,$(basename $(KERNEL_LIST) $(RUNTIME_LIST) dev/lab/main.cpp \
    $(if $(HAS_RUNTIME_HEADERS),$(GPU_SOURCES))))
$(BUILD)/simt-lint/%: %.cpp $(BUILD)/simt/plain/%.o .clang-tidy
	$(check_kernels)
$(BUILD)/simt-lint/%: %.cu $(BUILD)/simt/plain/%.o .clang-tidy
	$(check_kernels)
define check_kernels
@echo 'clang-tidy $<'
@mkdir -p $(@D)
$(QUIET)$(CLANG_TIDY) -Wno-unknown-pragmas -Itest $(CUDA_INCLUDES) 2>$@.log || { cat $@.log; exit 1; }
@touch $@
endef

# ---- By nvcc ---------------------------------------------------------------------------------------------

# nvcc's parser fails on fmt's compile-time checks of format strings, which g++ does anyway. Compressed code
# for several chips has a third of the size and takes no longer to compile. compile_nvcc reads the PTX from
# the kept files. -O1 is of the host's code alone, which only launches kernels.
NVCC_CHIPS = $(NVCC) -std=c++20 -O1 --keep -DFMT_CONSTEVAL= -DFMT_USE_CONSTEXPR=1 --threads 0 --compress-mode=size \
    $(foreach arch,$(GPU_ARCH),-gencode=arch=compute_$(arch),code=sm_$(arch)) \
    -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas -I. -Itest $(LIBRARY_CFLAGS)
NVCC_COMPILE = $(NVCC_CHIPS) $(foreach arch,$(GPU_PTX),-gencode=arch=compute_$(arch),code=compute_$(arch)) -c
# Compiles only the device code, for the compiler's figures where the lab cannot run on a GPU. The host code
# would take most of the time.
NVCC_REPORT = $(NVCC_CHIPS) -fatbin
# The kept parts of the PTX: the chip, the most threads per block, and the instructions that access global
# memory.
KEPT_OF_PTX := /^\.target\|^\.maxntid\|\.entry/p; s/.*[[:space:]]\(\(ld\|st\|cp\)\.[a-z0-9_.:]*global[a-z0-9_.:]*\).*/\1/p
NVCC_FLAGS = $(NVCC_COMPILE) $(KEPT_OF_PTX)
$(eval $(call remember,$(BUILD)/nvcc-flags.txt,NVCC_FLAGS))

$(BUILD)/nvcc/%.o: %.cu $(BUILD)/nvcc-flags.txt | $(BUILD)/libraries.ok
	$(call compile_nvcc,$(NVCC_COMPILE))
$(BUILD)/nvcc/%.o: %.cpp $(BUILD)/nvcc-flags.txt | $(BUILD)/libraries.ok
	$(call compile_nvcc,$(NVCC_COMPILE))
$(BUILD)/nvcc/%.fatbin: %.cu $(BUILD)/nvcc-flags.txt | $(BUILD)/libraries.ok
	$(call compile_nvcc,$(NVCC_REPORT))
define compile_nvcc
@echo 'nvcc $<'
@mkdir -p $@.kept
$(QUIET)$(1) --keep-dir $@.kept -Xptxas -v -MMD -MF $@.d -MP -x cu $< -o $@ 2>$@.log || \
    { cat $@.log; exit 1; }
@sed -n '$(KEPT_OF_PTX)' $@.kept/*.ptx >>$@.log
@rm -r $@.kept
endef
LAB_FIGURES := $(LAB_SOURCES:%.cu=$(BUILD)/nvcc/%.fatbin)
-include $(addsuffix .d,$(call nvcc_objects,$(LAB_SOURCES) $(ON_GPU) $(GPU_SOURCES) dev/lab/main.cpp) $(LAB_FIGURES))

# The compiler's reports: on the kernels that the trainer links, and on those of the lab.
KERNEL_REPORT := $(if $(WITH_CUDA),$(BUILD)/nvcc/report.txt)
LAB_REPORT := $(if $(NVCC),$(BUILD)/nvcc/lab-report.txt)
$(BUILD)/nvcc/report.txt: $(call nvcc_objects,$(GPU_SOURCES)) $(BUILD)/gpu.txt
$(BUILD)/nvcc/lab-report.txt: $(LAB_FIGURES) $(BUILD)/kernels.txt
$(BUILD)/nvcc/report.txt $(BUILD)/nvcc/lab-report.txt: dev/lab/kernel_report.py
	$(QUIET)$(PYTHON) dev/lab/kernel_report.py $(patsubst %,%.log,$(filter %.o %.fatbin,$^)) >$@

# ---- The programs ----------------------------------------------------------------------------------------

# The CPU device, to compare with, and cuBLASLt's products and cuDNN's attention.
LAB_LIBRARY := $(filter $(BUILD)/objects/llmc/core/% $(BUILD)/objects/llmc/device/%,$(LIBRARY)) $(call objects,$(CUDNN_HOST) \
    $(LT_PRODUCTS))

# ./dev/X runs on the GPU if this machine has one, otherwise on the executor.
ifneq ($(and $(GPU),$(NVCC)),)
$(LAB_PROGRAMS): dev/%: $(call nvcc_objects,dev/%.cu $(LAB_COMMON) $(LAB_ON_GPU) $(CHECKSUM) dev/lab/main.cpp) $(LAB_LIBRARY)
	$(link_nvcc)
else
$(LAB_PROGRAMS): dev/%: $(call simt_objects,plain,dev/%.cu $(SIMT_SOURCES) $(LAB_COMMON) dev/lab/no_gpu.cpp \
    dev/lab/main.cpp) $(LAB_REPORT)
	$(link_simt) $(filter %.o,$^) $(LIBRARIES) -lboost_context -o $@
endif

# The lab and the kernels' tests, as one program for a GPU.
$(BUILD)/gpu/kernels: $(call nvcc_objects,$(ON_GPU)) $(LAB_LIBRARY) $(BUILD)/kernels.txt
	$(link_nvcc) -lgtest
# Building all of it with nvcc takes long.
LONG_PROGRAMS += $(if $(SANITIZED),,$(and $(WITH_CUDA),$(BUILD)/gpu/kernels))

define link_nvcc
@echo 'link $@'
@mkdir -p $(@D)
$(QUIET)$(NVCC) -Xcompiler -fopenmp $(LDFLAGS) $(filter %.o,$^) -lfmt -lxxhash -ldnnl -ldl -o $@
endef
