// How much memory this machine, or the container that the process runs in, has left.
#pragma once

#include <cstddef>
#include <optional>

namespace llmc::cpu {

// Bytes that processes may still allocate without swapping, if the system says. Page cache counts as free.
std::optional<std::size_t> available_memory();

}  // namespace llmc::cpu
