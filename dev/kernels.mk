# The kernels and their lab, for the Makefile. Each dev/X.cu and each test of the kernels is compiled
# - by g++, for the executor of test/simt: plain, and with the checks of two sanitizers,
# - by nvcc, for GPUs, where CUDA's compiler is there. What it says of registers and spills is kept.

# The folder of CUDA's headers, and of nvcc where bin/nvcc is in it.
CUDA_FOLDER := $(shell scripts/deps.sh cuda)
NVCC := $(wildcard $(CUDA_FOLDER)/bin/nvcc)
GPU := $(wildcard /dev/nvidia0)
# This machine's chips, such as 90a: Hopper's own instructions are in no other's code.
own_chips = $(sort $(patsubst 90,90a,$(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader))))
# sm_80's code runs on sm_86 and sm_89 too.
GPU_ARCH ?= $(or $(if $(GPU),$(own_chips)),80 90a)

# The trainer's GPU part: with nvcc and cuBLASLt, unless CUDA=0 leaves it out.
WITH_CUDA := $(if $(filter 0,$(CUDA)),,$(and $(NVCC),$(wildcard $(CUDA_FOLDER)/include/cublasLt.h)))
WITH_NCCL := $(and $(WITH_CUDA),$(firstword $(wildcard $(CUDA_FOLDER)/include/nccl.h /usr/include/nccl.h)))
GPU_SOURCES := $(sort $(wildcard llmc/device/cuda/*.cu))
# What the host does for a GPU; each part has a stand-in, no_X.cpp, for programs without it.
CUDA_HOST := $(filter-out %/no_cuda.cpp %/no_nccl.cpp %/nccl_communicator.cpp,$(CUDA_HOST_SOURCES)) \
    llmc/comm/nccl/$(if $(WITH_NCCL),nccl_communicator,no_nccl).cpp
NO_GPU_OBJECTS = $(call objects,llmc/device/cuda/no_cuda.cpp llmc/comm/nccl/no_nccl.cpp)
ifdef WITH_CUDA
GPU_OBJECTS = $(call objects,$(CUDA_HOST)) $(call nvcc_objects,$(GPU_SOURCES))
CUDA_LIBRARIES := $(firstword $(wildcard $(CUDA_FOLDER)/lib64 $(CUDA_FOLDER)/lib))
GPU_LIBRARIES := -L$(CUDA_LIBRARIES) -Wl,-rpath,$(CUDA_LIBRARIES) -lcublasLt $(if $(WITH_NCCL),-lnccl) \
    -lcudart_static -ldl -lrt
else
GPU_OBJECTS = $(NO_GPU_OBJECTS)
endif

LAB_SOURCES := $(sort $(wildcard dev/*.cu))
LAB_PROGRAMS := $(basename $(LAB_SOURCES))
LAB_COMMON := $(filter-out dev/lab/main.cpp dev/lab/no_gpu.cpp,$(sort $(wildcard dev/lab/*.cpp)))
KERNEL_TEST_SOURCES := $(sort $(wildcard test/kernels/*.cpp))
# Of the executor itself, never for a GPU.
SIMT_TEST_SOURCES := $(sort $(wildcard test/simt/*_test.cpp))
SIMT_SOURCES := $(filter-out $(SIMT_TEST_SOURCES),$(sort $(wildcard test/simt/*.cpp)))

# ---- On the executor -------------------------------------------------------------------------------------

# Their checks exclude each other, and a build with SANITIZE=1 has one already.
SIMT_KINDS := $(if $(SANITIZED),,plain address thread)
KERNEL_TESTS := $(SIMT_KINDS:%=$(BUILD)/test/kernels-%)
# A local variable that was not set reads as a large number or NaN, where it would often be 0.
CHECKS_plain := -O2 -ftrivial-auto-var-init=pattern
# Without those checks of undefined behaviour that double the time to compile and find nothing in kernels.
CHECKS_address := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=null,vptr,object-size \
    -fno-sanitize-recover=all
CHECKS_thread := -O1 -g1 -fsanitize=thread
DEFINE_address := -DSIMT_ADDRESS
DEFINE_thread := -DSIMT_THREAD

# The lab's GPU, and the libraries it is compared with: cuDNN where its frontend's headers are (`scripts/deps.sh gpu`).
CUDNN_FRONTEND := $(and $(wildcard $(CUDA_FOLDER)/include/cudnn.h),$(wildcard .cuda/include/cudnn_frontend.h))
CUDNN_LIBRARIES := $(if $(CUDNN_FRONTEND),-lcudnn -lnvrtc)
LAB_ON_GPU := dev/lab/gpu.cu dev/lab/rivals.cu dev/lab/matmul_rival.cu dev/lab/rivals_$(if $(CUDNN_FRONTEND),,no_)cudnn.cu
# The trainer's products by cuBLASLt, one of the rivals.
LT_PRODUCTS := llmc/device/cuda/lt_products.cpp llmc/device/cuda/cuda_queues.cpp
ON_GPU := $(LAB_SOURCES) $(LAB_COMMON) $(LAB_ON_GPU) $(KERNEL_TEST_SOURCES)

# What runs on the executor beside the executor.
ON_EXECUTOR := $(LAB_SOURCES) $(LAB_COMMON) dev/lab/no_gpu.cpp $(KERNEL_TEST_SOURCES) $(SIMT_TEST_SOURCES)
KERNEL_LIST := $(SIMT_SOURCES) $(ON_EXECUTOR)

# CUDA's headers read one type as another.
SIMT_COMPILE = $(CXX) -std=c++20 $(MACHINE) -fno-strict-aliasing -fno-math-errno $(WARNINGS) -Wno-unknown-pragmas \
    -I. -Itest -isystem $(CUDA_FOLDER)/include $(LIBRARY_CFLAGS) $(CXXFLAGS)
$(eval $(call remember,$(BUILD)/simt-flags.txt,SIMT_COMPILE))
$(eval $(call remember,$(BUILD)/kernels.txt,KERNEL_LIST))
simt_objects = $(patsubst %,$(BUILD)/simt/$(1)/%.o,$(basename $(2)))

define simt_kind
# The executor's bookkeeping is unchecked in every kind; it only tells the sanitizers of its fibers.
$(call simt_objects,$(1),$(SIMT_SOURCES)): CHECKS := -O2 $(DEFINE_$(1))
$(call simt_objects,$(1),$(ON_EXECUTOR) dev/lab/main.cpp): \
    CHECKS := $(CHECKS_$(1)) $(DEFINE_$(1))
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
$(QUIET)$(SIMT_COMPILE) $(CHECKS) -MMD -MP -x c++ -c $< -o $@
endef

# Kernels are known by their symbols.
define link_simt
@echo 'link $@'
@mkdir -p $(@D)
$(QUIET)$(CXX) -rdynamic -fopenmp $(LDFLAGS)
endef
$(foreach kind,$(or $(SIMT_KINDS),plain),$(eval $(call simt_kind,$(kind))))

include test/simt/runtime.mk

# clang-tidy reads the kernels as the executor does.
KERNEL_LINT := $(patsubst %,$(BUILD)/simt-lint/%,$(basename $(KERNEL_LIST) $(RUNTIME_LIST) dev/lab/main.cpp))
$(BUILD)/simt-lint/%: %.cpp $(BUILD)/simt/plain/%.o .clang-tidy
	$(check_kernels)
$(BUILD)/simt-lint/%: %.cu $(BUILD)/simt/plain/%.o .clang-tidy
	$(check_kernels)
define check_kernels
@echo 'clang-tidy $<'
@mkdir -p $(@D)
$(QUIET)$(CLANG_TIDY) --quiet $< -- -x c++ -std=c++20 -Wno-unknown-pragmas $(MACHINE) -I. -Itest \
    -isystem $(CUDA_FOLDER)/include $(LIBRARY_CFLAGS) 2>$@.log || { cat $@.log; exit 1; }
@touch $@
endef

# ---- By nvcc ---------------------------------------------------------------------------------------------

# For chips to come, where the chips are not chosen: 90a's own code does not run there.
comma := ,
PTX := $(if $(findstring 80 90a,$(GPU_ARCH)),-gencode=arch=compute_90$(comma)code=compute_90)
# nvcc's parser stops at fmt's checks of format strings, which g++ makes anyway.
NVCC_COMPILE = $(NVCC) -std=c++20 -O3 -DFMT_CONSTEVAL= -DFMT_USE_CONSTEXPR=1 --threads 0 \
    $(foreach arch,$(GPU_ARCH),-gencode=arch=compute_$(arch),code=sm_$(arch)) $(PTX) \
    -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas -I. -Itest -isystem .cuda/include $(LIBRARY_CFLAGS)
$(eval $(call remember,$(BUILD)/nvcc-flags.txt,NVCC_COMPILE))
nvcc_objects = $(patsubst %,$(BUILD)/nvcc/%.o,$(basename $(1)))

$(BUILD)/nvcc/%.o: %.cu $(BUILD)/nvcc-flags.txt | $(BUILD)/libraries.ok
	$(compile_nvcc)
$(BUILD)/nvcc/%.o: %.cpp $(BUILD)/nvcc-flags.txt | $(BUILD)/libraries.ok
	$(compile_nvcc)
define compile_nvcc
@echo 'nvcc $<'
@mkdir -p $(@D)
$(QUIET)$(NVCC_COMPILE) -Xptxas -v -MMD -MP -x cu -c $< -o $@ 2>$(@:.o=.log) || { cat $(@:.o=.log); exit 1; }
endef
-include $(patsubst %.o,%.d,$(call nvcc_objects,$(LAB_SOURCES) $(ON_GPU) $(GPU_SOURCES) dev/lab/main.cpp))

# What the compiler says of every kernel of the lab, those of llmc/ among them.
KERNEL_REPORT := $(if $(NVCC),$(BUILD)/nvcc/report.txt)
$(BUILD)/nvcc/report.txt: $(call nvcc_objects,$(LAB_SOURCES)) dev/lab/kernel_report.py $(BUILD)/kernels.txt
	$(QUIET)$(PYTHON) dev/lab/kernel_report.py $(patsubst %.o,%.log,$(filter %.o,$^)) >$@

# ---- The programs ----------------------------------------------------------------------------------------

# ./dev/X runs on the GPU where this machine has one, and on the executor otherwise.
ifneq ($(and $(GPU),$(NVCC)),)
$(LAB_PROGRAMS): dev/%: $(call nvcc_objects,dev/%.cu $(LAB_COMMON) $(LAB_ON_GPU) dev/lab/main.cpp) \
    $(call objects,$(LT_PRODUCTS)) $(filter $(BUILD)/objects/llmc/core/%,$(LIBRARY))
	$(link_nvcc)
else
$(LAB_PROGRAMS): dev/%: $(call simt_objects,plain,dev/%.cu $(SIMT_SOURCES) $(LAB_COMMON) dev/lab/no_gpu.cpp \
    dev/lab/main.cpp) $(KERNEL_REPORT)
	$(link_simt) $(filter %.o,$^) $(LIBRARIES) -lboost_context -o $@
endif

# The lab and the kernels' tests, as one program for a GPU, with the CPU device to compare with.
$(BUILD)/gpu/kernels: $(call nvcc_objects,$(ON_GPU)) $(call objects,$(LT_PRODUCTS)) \
    $(filter $(BUILD)/objects/llmc/core/% $(BUILD)/objects/llmc/device/%,$(LIBRARY)) $(BUILD)/kernels.txt
	$(link_nvcc) -lgtest

define link_nvcc
@echo 'link $@'
@mkdir -p $(@D)
$(QUIET)$(NVCC) -Xcompiler -fopenmp $(LDFLAGS) $(filter %.o,$^) -lfmt -lxxhash -ldnnl -lcublasLt $(CUDNN_LIBRARIES) -o $@
endef
