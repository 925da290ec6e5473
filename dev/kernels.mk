# The kernels and their lab, for the Makefile. Each dev/X.cu and each test of the kernels is compiled
# - by g++, for the executor of test/simt: plain, and with the checks of two sanitizers,
# - by nvcc, for GPUs, where CUDA's compiler is there. What it says of registers and spills is kept.

# The folder of CUDA's headers, and of nvcc where bin/nvcc is in it: CUDA_HOME, or what scripts/deps.sh finds.
CUDA_FOLDER := $(shell CUDA_HOME='$(CUDA_HOME)' scripts/deps.sh cuda)
NVCC := $(wildcard $(CUDA_FOLDER)/bin/nvcc)
# $(call cuda_header,NAME,LIBRARY), $(call cuda_library,LIBRARY): in the toolkit, or beside it, where Python's packages have
# them (without names that lack the version), or in the system.
cuda_header = $(firstword $(wildcard $(patsubst %,%/$(1),$(CUDA_FOLDER)/include $(CUDA_FOLDER)/../$(2)/include /usr/include)))
cuda_library = $(abspath $(firstword $(wildcard $(foreach folder,$(CUDA_FOLDER)/lib64 $(CUDA_FOLDER)/lib $(CUDA_FOLDER)/../$(1)/lib \
    $(wildcard /usr/lib/*-linux-gnu) /usr/lib64,$(folder)/lib$(1).so $(folder)/lib$(1).so.*))))
NCCL_HEADER := $(call cuda_header,nccl.h,nccl)
CUDNN_HEADER := $(call cuda_header,cudnn.h,cudnn)
CUBLASLT_HEADER := $(wildcard $(CUDA_FOLDER)/include/cublasLt.h)
# cuDNN's frontend is headers alone: those of `make deps-gpu`, of the toolkit, of the system, or of Python's package.
FRONTEND_OF_PYTHON = $(shell $(PYTHON) -c 'import importlib.metadata as m; print(next(f.locate().resolve() for f in \
    m.files("nvidia-cudnn-frontend") if f.name == "cudnn_frontend.h"))' 2>/dev/null)
CUDNN_FRONTEND := $(if $(CUDNN_HEADER),$(or $(firstword $(wildcard $(patsubst %,%/include/cudnn_frontend.h,.cuda $(CUDA_FOLDER) /usr))),\
    $(FRONTEND_OF_PYTHON)))
CUDA_INCLUDES := $(patsubst %/,-isystem %,$(CUDA_FOLDER)/include/ $(filter-out /usr/include/ $(CUDA_FOLDER)/include/,\
    $(sort $(dir $(NCCL_HEADER) $(CUDNN_HEADER) $(CUDNN_FRONTEND)))))
# For what can do without it.
get_cudnn_frontend = $(if $(CUDNN_FRONTEND),,@$(if $(CUDNN_HEADER),scripts/deps.sh gpu optional,echo 'warning: no cudnn.h here; going on \
    without cuDNN' >&2))

# The chips to compile for, such as 90a: Hopper's own instructions are in no other's code, and sm_80's code runs on sm_86
# and sm_89 too. This machine's chips, if it has any that the kernels run on.
GPU := $(firstword $(wildcard /dev/nvidia[0-9]*))
demand_gpu = $(if $(GPU),,echo 'error: no GPU here (no /dev/nvidia0 or other); `make bench-check` runs the kernels on the CPU' >&2; exit 1)
ifndef GPU_ARCH
OWN_CHIPS := $(if $(GPU),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    sed -n 's/^\([89]\|1[0-9]\)\.\([0-9]\)$$/\1\2/p'))
GPU_ARCH := $(or $(sort $(OWN_CHIPS:90=90a)),80 90a)
# For chips to come: 90a's own code does not run there.
GPU_PTX := $(if $(OWN_CHIPS),,90)
endif
# sm_80 to sm_129, and those with instructions of their own or of their family's.
CHIPS := $(foreach tens,8 9 10 11 12,$(foreach unit,0 1 2 3 4 5 6 7 8 9,$(patsubst %,$(tens)$(unit)%,a f) $(tens)$(unit)))
ifneq (,$(if $(strip $(GPU_ARCH)),$(filter-out $(CHIPS),$(GPU_ARCH)),none))
$(error GPU_ARCH='$(GPU_ARCH)': the kernels take sm_80 and later; give the chips' numbers, such as GPU_ARCH='80 90a')
endif

# The trainer's GPU part: with nvcc and cuBLASLt, unless CUDA=0 leaves it out.
CUBLASLT := $(call cuda_library,cublasLt)
CUDART := $(firstword $(wildcard $(CUDA_FOLDER)/lib64/libcudart_static.a $(CUDA_FOLDER)/lib/libcudart_static.a))
WITHOUT_CUDA := $(strip $(if $(filter 0,$(CUDA)),CUDA=0,$(if $(NVCC),$(if $(and $(CUBLASLT_HEADER),$(CUBLASLT),$(CUDART)),,no cuBLASLt \
    here),no nvcc here)))
WITH_CUDA := $(if $(WITHOUT_CUDA),,yes)
NCCL := $(and $(WITH_CUDA),$(NCCL_HEADER),$(call cuda_library,nccl))
GPU_SOURCES := $(sort $(wildcard llmc/device/cuda/*.cu))
# What the host does for a GPU; each part has a stand-in, no_X.cpp, for programs without it.
CUDNN_SOURCES := llmc/device/cuda/cudnn_attention.cpp llmc/device/cuda/cudnn_library.cpp
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
# cuBLASLt and cuDNN are looked for when they are needed, there too.
GPU_LIBRARIES := $(NCCL) $(CUDART) -ldl -lrt $(patsubst %/,-Wl$(comma)-rpath$(comma)%,$(sort $(dir $(CUBLASLT) $(NCCL) \
    $(if $(CUDNN_FRONTEND),$(call cuda_library,cudnn)))))
else
GPU_PART := no CUDA ($(WITHOUT_CUDA))
GPU_OBJECTS = $(NO_GPU_OBJECTS)
endif
# Known before what is linked is compared with what was.
nvcc_objects = $(patsubst %,$(BUILD)/nvcc/%.o,$(basename $(1)))
GPU_LINK = $(GPU_OBJECTS) $(GPU_LIBRARIES)
$(eval $(call remember,$(BUILD)/gpu.txt,GPU_LINK))
$(eval $(call remember,$(BUILD)/cuda-flags.txt,CUDA_INCLUDES))

LAB_SOURCES := $(sort $(wildcard dev/*.cu))
LAB_PROGRAMS := $(basename $(LAB_SOURCES))
LAB_COMMON := $(filter-out dev/lab/main.cpp dev/lab/no_gpu.cpp,$(sort $(wildcard dev/lab/*.cpp)))
KERNEL_TEST_SOURCES := $(sort $(wildcard test/kernels/*.cpp))
# Of the executor itself, never for a GPU.
SIMT_TEST_SOURCES := $(sort $(wildcard test/simt/*_test.cpp))
SIMT_SOURCES := $(filter-out $(SIMT_TEST_SOURCES),$(sort $(wildcard test/simt/*.cpp)))

# ---- On the executor -------------------------------------------------------------------------------------

# Their checks exclude each other, and a build with SANITIZE=1 has one already. What the plain kind would find the checked
# ones find too; it is the fastest, and runs many orders of the threads in `make test-long`.
SIMT_KINDS := $(if $(SANITIZED),,plain address thread)
KERNEL_TESTS := $(patsubst %,$(BUILD)/test/kernels-%,$(filter-out plain,$(SIMT_KINDS)))
LONG_PROGRAMS := $(patsubst %,$(BUILD)/test/kernels-%,$(filter plain,$(SIMT_KINDS)))
# The one that `make bench-check` runs: of what `make test` has built, where it has.
LAB_CHECK := $(BUILD)/test/kernels-$(if $(SANITIZED),plain,address)
# A local variable that was not set reads as a large number or NaN, where it would often be 0.
UNSET := -ftrivial-auto-var-init=pattern
CHECKS_plain := -O2 $(UNSET)
# -Og compiles in half the time of -O1, and runs as fast. Those checks of undefined behaviour are left out that double the time
# again and find nothing in kernels. With an initial pattern and checks g++ warns of variables in fmt that are set; the thread
# kind keeps that warning.
CHECKS_address := -Og -g1 $(UNSET) -Wno-uninitialized -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=null,vptr,object-size \
    -fno-sanitize-recover=all
CHECKS_thread := -Og -g1 -fsanitize=thread
DEFINE_address := -DSIMT_ADDRESS
DEFINE_thread := -DSIMT_THREAD

# The lab's GPU, and the libraries it is compared with.
LAB_ON_GPU := dev/lab/gpu.cu dev/lab/rivals.cu dev/lab/matmul_rival.cu dev/lab/rivals_cudnn.cu
# The trainer's products by cuBLASLt, one of the rivals.
LT_PRODUCTS := llmc/device/cuda/lt_products.cpp $(CUBLASLT_SOURCE) llmc/device/cuda/cuda_queues.cpp
ON_GPU := $(LAB_SOURCES) $(LAB_COMMON) $(LAB_ON_GPU) $(KERNEL_TEST_SOURCES)

# What runs on the executor beside the executor itself.
ON_EXECUTOR := $(LAB_SOURCES) $(LAB_COMMON) dev/lab/no_gpu.cpp $(KERNEL_TEST_SOURCES) $(SIMT_TEST_SOURCES)
KERNEL_LIST := $(SIMT_SOURCES) $(ON_EXECUTOR)

# CUDA's headers read one type as another.
SIMT_COMPILE = $(CXX) -std=c++20 $(MACHINE) -fno-strict-aliasing -fno-math-errno $(WARNINGS) -Wno-unknown-pragmas \
    -I. -Itest $(CUDA_INCLUDES) $(LIBRARY_CFLAGS) $(CXXFLAGS)
SIMT_FLAGS = $(SIMT_COMPILE) $(foreach kind,$(SIMT_KINDS),$(CHECKS_$(kind)))
$(eval $(call remember,$(BUILD)/simt-flags.txt,SIMT_FLAGS))
$(eval $(call remember,$(BUILD)/kernels.txt,KERNEL_LIST))
simt_objects = $(patsubst %,$(BUILD)/simt/$(1)/%.o,$(basename $(2)))

define simt_kind
# The executor's bookkeeping is unchecked in every kind; it only tells the sanitizers of its fibers. Nor are there kernels in
# the lab's common files.
$(call simt_objects,$(1),$(SIMT_SOURCES)): CHECKS := -O2 $(DEFINE_$(1))
$(call simt_objects,$(1),$(LAB_COMMON) dev/lab/no_gpu.cpp dev/lab/main.cpp): CHECKS := -Og $(DEFINE_$(1))
$(call simt_objects,$(1),$(LAB_SOURCES) $(KERNEL_TEST_SOURCES) $(SIMT_TEST_SOURCES)): CHECKS := $(CHECKS_$(1)) $(DEFINE_$(1))
$(BUILD)/simt/$(1)/%.o: %.cpp $(BUILD)/simt-flags.txt | $(BUILD)/libraries.ok
	$$(compile_simt)
$(BUILD)/simt/$(1)/%.o: %.cu $(BUILD)/simt-flags.txt | $(BUILD)/libraries.ok
	$$(compile_simt)
$(BUILD)/test/kernels-$(1): $(call simt_objects,$(1),$(KERNEL_LIST)) $(LIBRARY) $(NO_GPU_OBJECTS) $(BUILD)/library.txt $(BUILD)/link.txt $(BUILD)/kernels.txt
	$$(link_simt) $(CHECKS_$(1)) $$(filter %.o,$$^) $$(LIBRARIES) -lboost_context -lgtest -o $$@
-include $(patsubst %.o,%.d,$(call simt_objects,$(1),$(KERNEL_LIST) dev/lab/main.cpp))
endef

define compile_simt
@echo 'compile $< ($(firstword $(subst /, ,$(@:$(BUILD)/simt/%=%))))'
@mkdir -p $(@D)
$(QUIET)$(SIMT_COMPILE) $(CHECKS) $(PRECOMPILED) -MMD -MP -x c++ -c $< -o $@
endef

# Kernels are known by their symbols.
define link_simt
@echo 'link $@'
@mkdir -p $(@D)
$(QUIET)$(CXX) $(or $(EXPORTS),-rdynamic) -fopenmp $(LDFLAGS)
endef
$(foreach kind,$(or $(SIMT_KINDS),plain),$(eval $(call simt_kind,$(kind))))

include test/simt/runtime.mk

ifdef PRECOMPILES
$(foreach kind,$(SIMT_KINDS),$(eval $(call precompile,$(kind),test/precompiled.h,$(SIMT_COMPILE) $(CHECKS_$(kind)) $(DEFINE_$(kind)),\
    $(BUILD)/simt-flags.txt,$(call simt_objects,$(kind),$(LAB_SOURCES) $(KERNEL_TEST_SOURCES) $(SIMT_TEST_SOURCES) \
    $(if $(filter $(kind),$(RUNTIME_KINDS)),$(RUNTIME_TEST_SOURCES) $(RUNTIME_RIVALS) $(SIMULATED_CUDA))))))
endif

# clang-tidy reads the kernels as the executor does.
KERNEL_LINT := $(patsubst %,$(BUILD)/simt-lint/%,$(basename $(KERNEL_LIST) $(RUNTIME_LIST) dev/lab/main.cpp \
    $(if $(HAS_RUNTIME_HEADERS),$(GPU_SOURCES))))
$(BUILD)/simt-lint/%: %.cpp $(BUILD)/simt/plain/%.o .clang-tidy
	$(check_kernels)
$(BUILD)/simt-lint/%: %.cu $(BUILD)/simt/plain/%.o .clang-tidy
	$(check_kernels)
define check_kernels
@echo 'clang-tidy $<'
@mkdir -p $(@D)
$(QUIET)$(CLANG_TIDY) --quiet $< -- -x c++ -std=c++20 -Wno-unknown-pragmas $(MACHINE) -I. -Itest \
    $(CUDA_INCLUDES) $(LIBRARY_CFLAGS) 2>$@.log || { cat $@.log; exit 1; }
@touch $@
endef

# ---- By nvcc ---------------------------------------------------------------------------------------------

# nvcc's parser stops at fmt's checks of format strings, which g++ makes anyway. Code for several chips
# in a third of the size takes no longer to make. Of the files that are kept, compile_nvcc reads the PTX.
NVCC_CHIPS = $(NVCC) -std=c++20 -O3 --keep -DFMT_CONSTEVAL= -DFMT_USE_CONSTEXPR=1 --threads 0 --compress-mode=size \
    $(foreach arch,$(GPU_ARCH),-gencode=arch=compute_$(arch),code=sm_$(arch)) \
    -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas -I. -Itest $(LIBRARY_CFLAGS)
NVCC_COMPILE = $(NVCC_CHIPS) $(foreach arch,$(GPU_PTX),-gencode=arch=compute_$(arch),code=compute_$(arch)) -c
# Without the host's half, which is most of the time: the compiler's figures for the lab, where nothing runs it on a GPU.
NVCC_REPORT = $(NVCC_CHIPS) -fatbin
# For which chip, how many threads at most, and by which instructions a kernel reads and writes global memory.
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

# What the compiler says of every kernel of the lab, and of those that the trainer links.
KERNEL_REPORT := $(if $(NVCC),$(BUILD)/nvcc/report.txt)
$(BUILD)/nvcc/report.txt: $(LAB_FIGURES) $(if $(WITH_CUDA),$(call nvcc_objects,$(GPU_SOURCES))) dev/lab/kernel_report.py \
    $(BUILD)/kernels.txt $(BUILD)/gpu.txt
	$(QUIET)$(PYTHON) dev/lab/kernel_report.py $(patsubst %,%.log,$(filter %.o %.fatbin,$^)) >$@

# ---- The programs ----------------------------------------------------------------------------------------

# The CPU device, to compare with, and cuBLASLt's products and cuDNN's attention.
LAB_LIBRARY := $(filter $(BUILD)/objects/llmc/core/% $(BUILD)/objects/llmc/device/%,$(LIBRARY)) $(call objects,$(CUDNN_HOST) \
    $(LT_PRODUCTS))

# ./dev/X runs on the GPU where this machine has one, and on the executor otherwise.
ifneq ($(and $(GPU),$(NVCC)),)
$(LAB_PROGRAMS): dev/%: $(call nvcc_objects,dev/%.cu $(LAB_COMMON) $(LAB_ON_GPU) dev/lab/main.cpp) $(LAB_LIBRARY)
	$(link_nvcc)
else
$(LAB_PROGRAMS): dev/%: $(call simt_objects,plain,dev/%.cu $(SIMT_SOURCES) $(LAB_COMMON) dev/lab/no_gpu.cpp \
    dev/lab/main.cpp) $(KERNEL_REPORT)
	$(link_simt) $(filter %.o,$^) $(LIBRARIES) -lboost_context -o $@
endif

# The lab and the kernels' tests, as one program for a GPU.
$(BUILD)/gpu/kernels: $(call nvcc_objects,$(ON_GPU)) $(LAB_LIBRARY) $(BUILD)/kernels.txt
	$(link_nvcc) -lgtest
# All of it by nvcc takes long.
LONG_PROGRAMS += $(if $(SANITIZED),,$(and $(WITH_CUDA),$(BUILD)/gpu/kernels))

define link_nvcc
@echo 'link $@'
@mkdir -p $(@D)
$(QUIET)$(NVCC) -Xcompiler -fopenmp $(LDFLAGS) $(filter %.o,$^) -lfmt -lxxhash -ldnnl -ldl -o $@
endef
