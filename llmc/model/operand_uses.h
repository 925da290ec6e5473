// How an operation uses the operands of a call, for the check that the call says so (draft.h).
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "llmc/device/counting_ops.h"
#include "llmc/model/operation.h"
#include "llmc/model/part_lists.h"

namespace llmc {

// The use of one operand, which may be several fields of the operation.
struct Uses {
    bool reads = false, writes = false, leaves_rest = false;

    template <class T>
    void add(const OperandField<T>& field) {
        reads |= field.access != Access::write;
        writes |= field.access != Access::read;
        leaves_rest |= std::is_same_v<T, Heads> && writes;  // elements of the rows that belong to no head
    }
    bool suit(Access access) const {
        switch (access) {
            case Access::read:
                return reads && !writes;
            case Access::shape:
                return !writes;
            case Access::write:
                return writes && !reads;
            case Access::add:
                return writes && (reads || leaves_rest);
        }
        return false;
    }
};

// The first operand that the operation uses otherwise than its Access says; -1: none. `make` makes the operation from
// tensors without memory, in whose addresses the operands are found again.
template <class F>
int used_otherwise(const F& make, const Node& node, int ranks, const std::vector<Operand>& operands) {
    IdleOps none;
    const TensorParallel silent = TensorParallel::silent(ranks);
    std::array<Tensor, most_operands> tensors;
    for (std::size_t i = 0; i < operands.size(); ++i) {
        if (operands[i].kind == Operand::Kind::none) continue;
        // A run of sizes beyond 64 bits is refused later.
        if (operands[i].shape.elements() == std::numeric_limits<std::int64_t>::max()) return -1;
        tensors.at(i) = {marked_address(i + 1), operands[i].dtype, operands[i].shape};
    }
    const auto op = make(Running{.ops = none, .ranks = silent, .node = &node, .loss_scale = 1, .rows = {}},
                         tensors.data());
    std::array<Uses, most_operands> uses{};
    for_each_operand(op, [&](const auto& field) {
        const std::uintptr_t mark = mark_of(tensor_of(field.operand));
        if (mark > 0) uses.at(mark - 1).add(field);
    });
    for (std::size_t i = 0; i < operands.size(); ++i) {
        if (operands[i].kind != Operand::Kind::none && !uses[i].suit(operands[i].access))
            return static_cast<int>(i);
    }
    return -1;
}

}  // namespace llmc
