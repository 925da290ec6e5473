# `make bundle`, `make gpu-check` and `make bench-gpu-check`, for the Makefile. The bundle is a folder with
# the programs that the check runs on a GPU. It runs on machines that have only CUDA's libraries and Python.
# It includes the probes of test/probe/, which are linked with the trainer's GPU code.

# Such a machine lacks MPI: the objects are the same, except the one that uses MPI.
BUNDLE_LIBRARY := $(sort $(filter-out %/transport_mpi.o,$(LIBRARY)) $(call objects,llmc/comm/transport_no_mpi.cpp))
BUNDLE_PROGRAMS := $(addprefix $(BUILD)/gpu/,train_gpt model_probe op_check)
$(BUILD)/gpu/train_gpt: $(BUILD)/objects/train_gpt.o
$(BUILD)/gpu/model_probe $(BUILD)/gpu/op_check: $(BUILD)/gpu/%: $(BUILD)/objects/test/probe/%.o
$(BUNDLE_PROGRAMS): $(BUNDLE_LIBRARY) $(GPU_OBJECTS) $(BUILD)/library.txt $(BUILD)/link.txt
	@echo 'link $@'
	@mkdir -p $(@D)
	$(QUIET)$(LINK) -Wl,--gc-sections $(filter %.o,$^) $(filter-out $(MPI_LIBRARIES),$(LIBRARIES)) $(GPU_LIBRARIES) -o $@

# Measures the time that the GPU spends in kernels, with CUPTI, which comes with CUDA and with PyTorch.
PROFILER := $(BUILD)/gpu/libkernel_times.so
CUPTI := $(call cuda_library,cupti)
$(PROFILER): dev/gpu/kernel_times.cpp
	@echo 'link $@'
	@mkdir -p $(@D)
	$(QUIET)$(CXX) -std=c++20 -O2 $(WARNINGS) -shared -fPIC -Wl,-z,defs -isystem $(CUDA_FOLDER)/include $< $(CUPTI) -o $@

# Tests use these, or check that they link; without sanitizers, like the bundle.
TESTED_OF_BUNDLE := $(if $(SANITIZED),,$(if $(WITH_CUDA),$(BUNDLE_PROGRAMS) $(if $(CUPTI),$(PROFILER))))

# PART is first, kernels, model, bench or lab; without it, all of them. CHECK_OPTIONS go to dev/gpu/main.py.
gpu-check: $(if $(GPU),bundle)  ## checks and times everything on this machine's GPU, into dev/results/ (PART=first|kernels|model|bench|lab)
	@$(demand_gpu)
	@PYTHON=$(PYTHON) $(BUILD)/bundle/gpu_check $(PART) --results dev/results $(CHECK_OPTIONS)

# Takes at most nine minutes.
bench-gpu-check: override PART := kernels lab
bench-gpu-check: override CHECK_OPTIONS := --minutes 4.5 $(CHECK_OPTIONS)
bench-gpu-check: gpu-check  ## the operations, the launchers and the lab of `gpu-check` alone

bundle: deps  ## a folder that runs `gpu-check` on a machine with a GPU, CUDA's libraries and Python alone
	@$(if $(and $(WITH_CUDA),$(NCCL)),,echo 'error: the bundle is made with nvcc, cublasLt.h and nccl.h, which are not all here' >&2; exit 1)
	$(get_cudnn_frontend)
	@$(MAKE) $(in_parallel) $(BUNDLE_PROGRAMS) $(BUILD)/gpu/kernels $(if $(CUPTI),$(PROFILER))
	@PYTHON=$(PYTHON) dev/gpu/bundle.sh $(BUILD)/bundle $(PROFILER) $(BUNDLE_PROGRAMS) $(BUILD)/gpu/kernels

# The probes on the tests' simulated CUDA runtime, like the trainer (test/simt/runtime.mk has op_check-%).
SIMULATED_PROBES := $(patsubst %,$(BUILD)/test/model_probe-%,$(filter plain,$(RUNTIME_KINDS)))
define simulated_probe
$(BUILD)/test/model_probe-$(1) $(BUILD)/test/op_check-$(1): $(BUILD)/test/%-$(1): $(BUILD)/objects/test/probe/%.o $(call simt_objects,$(1),$(SIMT_SOURCES) \
    $(RUNTIME_SOURCES) $(SIMULATED_CUDA)) $(LIBRARY) $(BUILD)/library.txt $(BUILD)/link.txt $(BUILD)/kernels.txt $(BUILD)/runtime.txt
	$$(link_simt) $(CHECKS_$(1)) $$(filter %.o,$$^) $$(LIBRARIES) -lboost_context -o $$@
endef
$(foreach kind,$(RUNTIME_KINDS),$(eval $(call simulated_probe,$(kind))))
