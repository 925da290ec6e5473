// Files with the operands of many calls. The tensor "k/x" of a safetensors file is operand x of case k.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "llmc/io/safetensors.h"
#include "test/probe/operands.h"

namespace llmc::probe {

// Every tensor must have a floating-point dtype. Throws a UserError if the file is not of this kind.
inline std::map<std::string, HostTensors> read_cases(const std::filesystem::path& path) {
    const SafetensorsReader reader(path);
    std::map<std::string, HostTensors> cases;
    for (const SafetensorsEntry& entry : reader.entries()) {
        const std::size_t slash = entry.name.find('/');
        if (slash == std::string::npos)
            user_error("{}: the name {} has not the form CASE/OPERAND", path.string(), entry.name);
        HostTensor tensor{entry.shape, std::vector<double>(static_cast<std::size_t>(entry.shape.elements()))};
        reader.read(entry.name, std::span(tensor.values));
        cases[entry.name.substr(0, slash)][entry.name.substr(slash + 1)] = std::move(tensor);
    }
    return cases;
}

// Writes the tensors in fp64.
inline void write_cases(const std::filesystem::path& path, const std::map<std::string, HostTensors>& cases) {
    std::vector<SafetensorsEntry> entries;
    for (const auto& [name, tensors] : cases)
        for (const auto& [operand, tensor] : tensors)
            entries.push_back({fmt::format("{}/{}", name, operand), "F64", tensor.shape});
    SafetensorsWriter writer(path, entries);
    for (const auto& [name, tensors] : cases)
        for (const auto& [operand, tensor] : tensors)
            writer.append(fmt::format("{}/{}", name, operand), std::as_bytes(std::span(tensor.values)));
    writer.finish();
}

}  // namespace llmc::probe
