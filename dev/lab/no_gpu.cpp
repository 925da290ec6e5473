// Implements gpu.h where kernels run on the executor.
#include "dev/lab/gpu.h"
#include "dev/lab/rivals.h"
#include "simt/executor.h"
#include "simt/kernel_report.h"

namespace lab {
namespace {

const simt::KernelReport& report() {
    static const simt::KernelReport known = simt::read_kernel_report(simt::kernel_report_path());
    return known;
}

}  // namespace

std::string gpu_name() { return ""; }
llmc::cuda::LaunchContext gpu_context() { return {.chip = llmc::cuda::sm_80}; }
std::vector<llmc::cuda::Chip> known_chips() {
    std::vector<llmc::cuda::Chip> known;
    for (const auto& chip : {llmc::cuda::sm_80, llmc::cuda::sm_86, llmc::cuda::sm_90}) {
        if (report().contains(chip.architecture)) known.push_back(chip);
    }
    return known;
}
void synchronize() {}
double milliseconds(const std::function<void()>&, cudaStream_t) { return 0; }
double copy_bandwidth() { return 0; }
double product_rate() { return 0; }

void use_executor(std::uint64_t seed) {
    simt::options().seed = seed;
    simt::options().report = report();
}

std::vector<Rival> rivals_of(const std::string&, llmc::DType, const std::vector<std::int64_t>&) { return {}; }

std::optional<KernelFigures> kernel_figures(const llmc::cuda::Chip& chip, const void* kernel) {
    const auto* of_chip = simt::figures_on(report(), chip.architecture);
    if (!of_chip) return std::nullopt;
    const auto figures = of_chip->find(simt::symbol_of(kernel));
    if (figures == of_chip->end()) return std::nullopt;
    const auto& f = figures->second;
    return KernelFigures{simt::name_of_kernel(kernel), f.registers, f.static_shared_bytes,
                         f.stack_bytes + f.spill_bytes};
}

}  // namespace lab
