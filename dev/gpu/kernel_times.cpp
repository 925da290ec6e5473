// Records when the GPU ran a kernel, a copy or a fill. CUDA loads this library into a program
// (CUDA_INJECTION64_PATH). For each kernel, copy or fill it writes a line "BEGIN END", in nanoseconds, to the
// file named by KERNEL_TIMES. dev/gpu/kernel_times.py reads the file.
#include <cupti.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

namespace {

constexpr std::size_t buffer_bytes = 1 << 20;

std::FILE* file() {
    static std::FILE* const opened = [] {
        const char* name = std::getenv("KERNEL_TIMES");
        return name ? std::fopen(name, "w") : nullptr;
    }();
    return opened;
}

void write(std::uint64_t begin, std::uint64_t end) {
    std::fprintf(file(), "%llu %llu\n", static_cast<unsigned long long>(begin),
                 static_cast<unsigned long long>(end));
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* bytes, std::size_t* records) {
    *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, buffer_bytes));
    *bytes = buffer_bytes;
    *records = 0;
}

void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
            write(kernel->start, kernel->end);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
            write(copy->start, copy->end);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            const auto* fill = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
            write(fill->start, fill->end);
        }
    }
    std::free(buffer);
    std::fflush(file());
}

}  // namespace

// The driver calls this when the program first uses CUDA.
extern "C" int InitializeInjection() {
    if (!file() || cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS) return 0;
    // Flush every 200 ms, since the program is killed before its end.
    cuptiActivityFlushPeriod(200);
    for (const CUpti_ActivityKind kind :
         {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET})
        if (cuptiActivityEnable(kind) != CUPTI_SUCCESS) return 0;
    return 1;
}
