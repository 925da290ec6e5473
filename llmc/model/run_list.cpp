// Runs a part's lists, and derives facts from them (part_lists.h).
#include <algorithm>
#include <array>

#include "llmc/model/part_lists.h"

namespace llmc {

Shape own_shape(const Value& value, const PartSizes& sizes) {
    Shape own = Shape{sizes.batch} + value.shape;
    const int token_dim = value.token_dim + 1, divided_dim = value.divided_dim + 1;
    if (value.placement == Placement::stream) own.resize(token_dim, sizes.split.tokens(own[token_dim]));
    if (value.placement == Placement::divided)
        own.resize(divided_dim, value.divided_extent(sizes.split.ranks));
    return own;
}

bool reads_parameters(const List& list) {
    return std::ranges::any_of(list, [](const ListCall& call) {
        return std::ranges::any_of(call.operands, [](const ListOperand& operand) {
            return operand.space == Space::parameter && operand.access == Access::read;
        });
    });
}

std::uint64_t bytes_sent(const List& list) {
    std::uint64_t bytes = 0;
    for (const ListCall& call : list) bytes += call.sent;
    return bytes;
}

Tensor tensor_of(const ListOperand& operand, const PartMemory& memory, std::int64_t sequences,
                 const Running& running) {
    if (operand.space == Space::none || (operand.on_first_rank_only && running.ranks.rank() != 0)) return {};
    const auto space = static_cast<std::size_t>(operand.space);
    const PartMemory::Buffers& many = memory.many[space];
    Tensor tensor{many.empty() ? memory.one[space] : many[static_cast<std::size_t>(operand.index)],
                  operand.dtype, operand.shape};
    const RowRange& rows = running.rows;
    if (operand.extent != Extent::fixed)
        tensor.shape.resize(0, operand.extent == Extent::batch ? sequences : 1);
    if (operand.extent == Extent::rows || operand.extent == Extent::tail) tensor.shape.resize(1, rows.count);
    if (operand.extent == Extent::known) tensor.shape.resize(1, rows.position + rows.count);
    const auto skip = [&](std::int64_t elements) {
        tensor.data += static_cast<std::size_t>(elements) * size_of(tensor.dtype);
    };
    if (operand.extent == Extent::tail) skip(rows.position * (tensor.elements() / rows.count));
    if (operand.is_own_tokens) skip(running.ranks.rank() * tensor.elements());
    return tensor;
}

int fp8_products(const Part& part) {
    return static_cast<int>(
        std::ranges::count_if(part.nodes, [](const Node& node) { return node.operation->may_be_in_fp8; }));
}

void run_call(const ListCall& call, const PartMemory& memory, std::int64_t sequences, Running running) {
    std::array<Tensor, most_operands> tensors;
    running.node = call.node;
    for (std::size_t i = 0; i < call.operands.size(); ++i)
        tensors[i] = tensor_of(call.operands[i], memory, sequences, running);
    call.run(running, tensors.data());
}

void run_list(const List& list, const PartMemory& memory, std::int64_t sequences, const Running& running) {
    for (const ListCall& call : list) run_call(call, memory, sequences, running);
}

}  // namespace llmc
