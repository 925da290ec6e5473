# The CUDA runtime of the tests (test/simt/runtime/), for dev/kernels.mk. A program links it and the executor,
# so that the CUDA device's own host code runs without a GPU. The headers of cuBLASLt and NCCL must be
# installed; without them, test/run_suites.py reports that it skips the tests.

HAS_RUNTIME_HEADERS := $(and $(CUBLASLT_HEADER),$(NCCL_HEADER))
RUNTIME_TEST_SOURCES := $(sort $(wildcard test/simt/runtime/*_test.cpp))
RUNTIME_SOURCES := $(filter-out $(RUNTIME_TEST_SOURCES),$(sort $(wildcard test/simt/runtime/*.cpp)))
# Code of the lab that the tests run.
RUNTIME_RIVALS := dev/lab/rivals.cu dev/lab/matmul_rival.cu dev/lab/rivals_cudnn.cu
RUNTIME_LIST := $(if $(HAS_RUNTIME_HEADERS),$(RUNTIME_SOURCES) $(RUNTIME_TEST_SOURCES))
RUNTIME_KINDS := $(if $(HAS_RUNTIME_HEADERS),$(SIMT_KINDS))
RUNTIME_TESTS := $(patsubst %,$(BUILD)/test/cuda-runtime-%,$(filter plain,$(RUNTIME_KINDS)))
# Targets that take long to build (make test-long): here those with address checks.
LONG_PROGRAMS += $(foreach kind,$(filter address,$(RUNTIME_KINDS)),$(BUILD)/test/cuda-runtime-$(kind) $(BUILD)/test/train_gpt-$(kind))
$(eval $(call remember,$(BUILD)/runtime.txt,RUNTIME_LIST))

# The CUDA device without the code that finds cuBLASLt: the runtime provides its functions.
SIMULATED_CUDA := $(filter-out $(CUDNN_SOURCES) $(CUBLASLT_SOURCE) %/no_cuda.cpp %/no_nccl.cpp,$(CUDA_HOST_SOURCES)) $(GPU_SOURCES)

define runtime_kind
# Unchecked, like the executor: it touches memory that it hides from the host's code.
$(call simt_objects,$(1),$(RUNTIME_SOURCES)): CHECKS := -O2 $(DEFINE_$(1))
$(call simt_objects,$(1),$(RUNTIME_TEST_SOURCES) $(RUNTIME_RIVALS)): CHECKS := $(CHECKS_$(1)) $(DEFINE_$(1))
$(BUILD)/test/cuda-runtime-$(1): $(call simt_objects,$(1),$(SIMT_SOURCES) $(RUNTIME_LIST) $(RUNTIME_RIVALS) $(SIMULATED_CUDA)) $(LIBRARY) \
    $(BUILD)/library.txt $(BUILD)/link.txt $(BUILD)/kernels.txt $(BUILD)/runtime.txt
	$$(link_simt) $(CHECKS_$(1)) $$(filter %.o,$$^) $$(LIBRARIES) -lboost_context -lgtest_main -lgtest -o $$@
-include $(patsubst %.o,%.d,$(call simt_objects,$(1),$(RUNTIME_LIST) $(RUNTIME_RIVALS)))
endef
$(foreach kind,$(RUNTIME_KINDS),$(eval $(call runtime_kind,$(kind))))

# The trainer as it is for GPUs, with this runtime instead of CUDA's, cuBLASLt and NCCL. These programs export
# only the names of kernels and omit functions that are never called. The bundle for a GPU carries them.
$(BUILD)/test/train_gpt-% $(BUILD)/test/model_probe-% $(BUILD)/test/op_check-%: EXPORTS := -Wl,--gc-sections,--export-dynamic-symbol='*kernel*'
SIMULATED_PROGRAMS := $(foreach kind,$(filter plain,$(RUNTIME_KINDS)),$(BUILD)/test/train_gpt-$(kind) $(BUILD)/test/op_check-$(kind))
# Every operation with checked kernels.
CHECKED_OPS := $(foreach kind,$(filter-out plain,$(RUNTIME_KINDS)),$(BUILD)/test/op_check-$(kind))
define simulated_program
$(call simt_objects,$(1),$(SIMULATED_CUDA)): CHECKS := $(CHECKS_$(1)) $(DEFINE_$(1))
SIMULATED_OBJECTS_$(1) := $(BUILD)/objects/train_gpt.o $(call simt_objects,$(1),$(SIMT_SOURCES) $(RUNTIME_SOURCES) \
    $(SIMULATED_CUDA)) $(LIBRARY)
$(BUILD)/test/train_gpt-$(1): $$(SIMULATED_OBJECTS_$(1)) $(BUILD)/library.txt $(BUILD)/link.txt $(BUILD)/kernels.txt $(BUILD)/runtime.txt
	$$(link_simt) $(CHECKS_$(1)) $$(filter %.o,$$^) $$(LIBRARIES) -lboost_context -o $$@
-include $(patsubst %.o,%.d,$(call simt_objects,$(1),$(SIMULATED_CUDA)))
endef
$(foreach kind,$(RUNTIME_KINDS),$(eval $(call simulated_program,$(kind))))
