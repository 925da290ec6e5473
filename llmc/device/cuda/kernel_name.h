// A kernel's readable name, from its mangled symbol.
#pragma once

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

namespace llmc::cuda {

// For example "layernorm_forward_kernel5<float>": without its namespaces, result type and parameters.
inline std::string kernel_name(const std::string& symbol) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> demangled(
        abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
    std::string name = status == 0 ? demangled.get() : symbol;
    name = name.substr(0, name.find('('));
    const std::size_t arguments = std::min(name.find('<'), name.size());
    const std::size_t start = name.find_last_of(": ", arguments);
    return start == std::string::npos ? name : name.substr(start + 1);
}

}  // namespace llmc::cuda
