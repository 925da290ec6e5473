// What the compiler reports of the kernels: `make` writes it (dev/lab/kernel_report.py), the executor refuses launches
// by it, and the lab computes occupancy from it.
#pragma once

#include <map>
#include <string>

namespace simt {

struct KernelFigures {
    int registers = 0;  // a thread
    int stack_bytes = 0;
    int spill_bytes = 0;  // stores and loads
    int static_shared_bytes = 0;
    int most_threads = 1024;  // of a block: what its __launch_bounds__ grants
};

// By architecture (80 for sm_80), then by mangled name. Empty where there is no file.
using KernelReport = std::map<int, std::map<std::string, KernelFigures>>;
KernelReport read_kernel_report(const std::string& path);

// Of the code that runs on a chip: its own, or else the nearest earlier one's of the same generation, as sm_80's runs on
// sm_86. Null where the report has neither.
const std::map<std::string, KernelFigures>* figures_on(const KernelReport& report, int architecture);

// Where the file is: what the environment's KERNEL_REPORT says, or where `make` writes it.
std::string kernel_report_path();

// The mangled name of a kernel, empty where the program does not export it (it is linked with -rdynamic).
std::string symbol_of(const void* kernel);

}  // namespace simt
