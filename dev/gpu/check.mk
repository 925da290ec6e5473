# `make bundle`, `make gpu-check` and `make bench-gpu-check`, for the Makefile: the programs that the check runs on a GPU, in a folder that runs on
# machines with CUDA's libraries and Python alone; and the probe, which takes its device as the trainer does.

# Such a machine lacks MPI: the same objects but for the one that knows it.
BUNDLE_LIBRARY := $(sort $(filter-out %/transport_mpi.o,$(LIBRARY)) $(call objects,llmc/comm/transport_no_mpi.cpp))
BUNDLE_PROGRAMS := $(addprefix $(BUILD)/gpu/,train_gpt model_probe)
$(BUILD)/gpu/train_gpt: $(BUILD)/objects/train_gpt.o
$(BUILD)/gpu/model_probe: $(BUILD)/objects/test/probe/model_probe.o
$(BUNDLE_PROGRAMS): $(BUNDLE_LIBRARY) $(GPU_OBJECTS) $(BUILD)/library.txt $(BUILD)/link.txt
	@echo 'link $@'
	@mkdir -p $(@D)
	$(QUIET)$(LINK) $(filter %.o,$^) $(filter-out $(MPI_LIBRARIES),$(LIBRARIES)) $(GPU_LIBRARIES) -o $@

# Counts the time that the GPU spends in kernels, by CUPTI, which comes with CUDA and with PyTorch.
PROFILER := $(BUILD)/gpu/libkernel_times.so
CUPTI := $(call cuda_library,cupti)
$(PROFILER): dev/gpu/kernel_times.cpp
	@echo 'link $@'
	@mkdir -p $(@D)
	$(QUIET)$(CXX) -std=c++20 -O2 $(WARNINGS) -shared -fPIC -Wl,-z,defs -isystem $(CUDA_FOLDER)/include $< $(CUPTI) -o $@

# Tests look at them, or see that they link; without sanitizers, as the bundle is.
TESTED_OF_BUNDLE := $(if $(SANITIZED),,$(if $(WITH_CUDA),$(BUNDLE_PROGRAMS) $(if $(CUPTI),$(PROFILER))))

# PART=kernels, model, bench or lab; all of them without. CHECK_OPTIONS go to dev/gpu/main.py.
gpu-check: $(if $(GPU),bundle)  ## checks and times everything on this machine's GPU, into dev/results/ (PART=kernels|model|bench|lab)
	@$(demand_gpu)
	@PYTHON=$(PYTHON) $(BUILD)/bundle/gpu_check $(PART) --results dev/results $(CHECK_OPTIONS)

# Nine minutes at most.
bench-gpu-check: override PART := kernels lab
bench-gpu-check: override CHECK_OPTIONS := --minutes 4.5 $(CHECK_OPTIONS)
bench-gpu-check: gpu-check  ## the kernel tests and the lab of `gpu-check` alone

bundle: deps  ## a folder that runs `gpu-check` on a machine with a GPU, CUDA's libraries and Python alone
	@$(if $(and $(WITH_CUDA),$(NCCL)),,echo 'error: the bundle is made with nvcc, cublasLt.h and nccl.h, which are not all here' >&2; exit 1)
	$(get_cudnn_frontend)
	@$(MAKE) $(in_parallel) $(BUNDLE_PROGRAMS) $(BUILD)/gpu/kernels $(if $(CUPTI),$(PROFILER))
	@dev/gpu/bundle.sh $(BUILD)/bundle $(PROFILER) $(BUNDLE_PROGRAMS) $(BUILD)/gpu/kernels

# The probe on the tests' CUDA runtime, as the trainer (test/simt/runtime.mk).
SIMULATED_PROBES := $(patsubst %,$(BUILD)/test/model_probe-%,$(filter plain,$(RUNTIME_KINDS)))
define simulated_probe
$(BUILD)/test/model_probe-$(1): $(BUILD)/objects/test/probe/model_probe.o $(call simt_objects,$(1),$(SIMT_SOURCES) \
    $(RUNTIME_SOURCES) $(SIMULATED_CUDA)) $(LIBRARY) $(BUILD)/library.txt $(BUILD)/link.txt $(BUILD)/kernels.txt $(BUILD)/runtime.txt
	$$(link_simt) $(CHECKS_$(1)) $$(filter %.o,$$^) $$(LIBRARIES) -lboost_context -o $$@
endef
$(foreach kind,$(filter plain,$(RUNTIME_KINDS)),$(eval $(call simulated_probe,$(kind))))
