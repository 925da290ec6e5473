// Operations that compute nothing, and tensors without memory for them: what a list of calls costs is known from the
// shapes of its operands.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "llmc/core/tensor.h"
#include "llmc/device/ops.h"

namespace llmc {

// Addresses that stand for memory, one for each mark from 1 on: an operand is there if its address is not null. That of
// a part of a tensor has the tensor's mark.
inline std::byte* marked_address(std::uintptr_t mark) {
    return reinterpret_cast<std::byte*>(mark << 48);  // NOLINT(performance-no-int-to-ptr): never dereferenced
}
inline std::uintptr_t mark_of(const Tensor& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.data) >> 48;
}

// Does nothing. A step with it takes only the host's time to launch operations.
class IdleOps final : public Ops {
  public:
    void set_workspace(const Tensor&) override {}
    void run(const Op&) override {}
};

// Notes the cost of each operation.
class CountingOps final : public Ops {
  public:
    struct Counted {
        std::string_view name;
        OpCost cost;
    };

    void set_workspace(const Tensor&) override {}
    void run(const Op& op) override { counted.push_back({name_of(op), cost_of(op)}); }

    std::vector<Counted> counted;
};

}  // namespace llmc
