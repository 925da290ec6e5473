#include "simt/runtime/counts.h"

#include <cstdio>

#include "simt/executor.h"
#include "simt/runtime/memory.h"

namespace simt::runtime {

void Counts::write(const std::string& file) const {
    std::string text = "{";
    const char* separator = "";
    for (const auto& [kind, numbers] : numbers_) {
        text += "\"" + kind + "\": {";
        separator = "";
        for (const auto& [which, number] : numbers) {
            text += separator + ("\"" + which + "\": ") + std::to_string(number);
            separator = ", ";
        }
        text += "}, ";
    }
    const double mean = static_cast<double>(held_) / static_cast<double>(std::max<std::int64_t>(kernels_, 1));
    text += "\"multiprocessors\": {\"most wanted\": " + std::to_string(most_wanted_) +
            ", \"mean held\": " + std::to_string(mean) + "}, \"cudaMalloc\": [";
    separator = "";
    for (const std::size_t bytes : allocations_) {
        text += separator + std::to_string(bytes);
        separator = ", ";
    }
    text += "], \"kernels\": {";
    separator = "";
    for (const auto& [symbol, blocks] : launched_kernels()) {
        text += separator + ("\"" + symbol + "\": ") + std::to_string(blocks);
        separator = ", ";
    }
    text += "}}\n";
    std::FILE* const out = std::fopen(file.c_str(), "w");
    if (!out || std::fputs(text.c_str(), out) < 0 || std::fclose(out) != 0) stop("cannot write " + file);
}

}  // namespace simt::runtime
