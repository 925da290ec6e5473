// Gives each storage of a draft a buffer, and makes a list of calls with these buffers.
#include <algorithm>
#include <map>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/standard_library.h"
#include "llmc/model/derive_lists.h"

namespace llmc {

List Placing::operator()(Calls& draft, const Draft& calls, const ExtentOf& extent_of) {
    std::map<int, std::size_t> last;  // by storage, the last call that uses it
    for (std::size_t i = 0; i < calls.size(); ++i) {
        for (const Operand& operand : calls[i].operands) {
            if (is_storage(operand)) last[operand.index] = i;
        }
    }
    std::map<int, int> placed;  // by storage, its scratch buffer
    List list;
    for (std::size_t i = 0; i < calls.size(); ++i) {
        const DraftCall& call = calls[i];
        if (call.operands.size() > most_operands)
            programming_error(fmt::format("{}: {} {} has more than {} operands", part_.name, call.name,
                                          call.node->name, most_operands));
        ListCall& made = list.emplace_back(ListCall{call.node, call.name, call.run, {}, call.bytes});
        for (const Operand& operand : call.operands)
            made.operands.push_back(place(draft, operand, call, placed, extent_of));
        std::erase_if(placed, [&](const auto& buffer) { return last[buffer.first] == i; });
    }
    return list;
}

ListOperand Placing::place(Calls& draft, const Operand& operand, const DraftCall& call,
                           std::map<int, int>& placed, const ExtentOf& extent_of) {
    ListOperand made{.extent = Extent::fixed,
                     .access = operand.access,
                     .is_own_tokens = operand.is_own_tokens,
                     .on_first_rank_only = operand.on_first_rank_only,
                     .index = operand.index,
                     .dtype = operand.dtype,
                     .shape = operand.shape};
    switch (operand.kind) {
        case Operand::Kind::none:
            return {};
        case Operand::Kind::parameter:
            made.space = Space::parameter;
            return made;
        case Operand::Kind::parameter_gradient:
            made.space = Space::parameter_gradient;
            return made;
        case Operand::Kind::amax:
            made.space = Space::amax;
            return made;
        case Operand::Kind::angles: {
            auto& all = scratch_.angles;
            const auto found = std::ranges::find(all, *call.node->angles);
            made.space = Space::angles;
            made.index = static_cast<int>(found - all.begin());
            if (found == all.end()) all.push_back(*call.node->angles);
            return made;
        }
        case Operand::Kind::tokens:
        case Operand::Kind::targets:
            made.space = operand.kind == Operand::Kind::tokens ? Space::tokens : Space::targets;
            made.extent = extent_of(call, operand);
            return made;
        case Operand::Kind::storage:
            break;
    }
    const Storage& storage = draft.storage(operand.index);
    made.space = storage.home;
    made.index =
        storage.home == Space::scratch ? scratch_place(storage, operand.index, placed) : storage.index;
    made.storage = operand.index;
    made.version = operand.version;
    made.read_version = operand.read_version;
    if (!storage.is_fixed) made.extent = extent_of(call, operand);
    return made;
}

// The first free scratch buffer of this width and dtype; a new one if none is free.
int Placing::scratch_place(const Storage& storage, int id, std::map<int, int>& placed) {
    if (const auto found = placed.find(id); found != placed.end()) return found->second;
    auto& buffers = scratch_.buffers;
    std::size_t place = 0;
    const auto is_free = [&](std::size_t buffer) {
        return std::ranges::none_of(
            placed, [&](const auto& other) { return other.second == static_cast<int>(buffer); });
    };
    while (place < buffers.size() && (buffers[place].width != storage.width ||
                                      buffers[place].dtype != storage.dtype || !is_free(place)))
        ++place;
    if (place == buffers.size()) buffers.push_back({storage.width, storage.dtype, storage.shape});
    if (buffers[place].shape.elements() < storage.shape.elements()) buffers[place].shape = storage.shape;
    return placed[id] = static_cast<int>(place);
}

}  // namespace llmc
