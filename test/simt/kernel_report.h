// The compiler's report on the kernels of the trainer, or on those of the lab. `make` writes them
// (dev/lab/kernel_report.py). The executor refuses
// launches by it, and the lab computes occupancy from it.
#pragma once

#include <map>
#include <string>

namespace simt {

struct KernelFigures {
    int registers = 0;  // per thread
    int stack_bytes = 0;
    int spill_bytes = 0;  // stores and loads
    int static_shared_bytes = 0;
    int most_threads = 1024;  // the most threads of a block, as granted by its __launch_bounds__
};

// By architecture (80 for sm_80), then by mangled name. Empty if there is no file.
using KernelReport = std::map<int, std::map<std::string, KernelFigures>>;
KernelReport read_kernel_report(const std::string& path);

// The figures of the code that runs on a chip: its own, or those of the nearest earlier chip of the same
// generation. For example, the code of sm_80 runs on sm_86. Null if the report has neither.
const std::map<std::string, KernelFigures>* figures_on(const KernelReport& report, int architecture);

// The path of the file: the value of the environment variable KERNEL_REPORT, or the place where `make` writes
// the trainer's, for kernels-*, or the lab's, for other programs.
std::string kernel_report_path();

// The mangled name of a kernel. It is empty if the program does not export it; programs are linked with
// -rdynamic.
std::string symbol_of(const void* kernel);

}  // namespace simt
