#include "llmc/model/derive_rows.h"

#include <algorithm>
#include <ranges>
#include <set>

namespace llmc {

namespace {

// Keeps the new rows of an input, of which a rank has all tokens or its own.
template <bool Own>
void keep_rows(const Running& r, const Tensor* t) {
    const std::int64_t own = t[0].shape[1], C = t[0].shape[2], end = r.rows.position + r.rows.count;
    const std::int64_t first_own = Own ? r.ranks.rank() * own : 0;
    const std::int64_t first = std::max(r.rows.position, first_own), last = std::min(end, first_own + own);
    if (first >= last) return;
    r.ops.copy(t[0].flat((first - first_own) * C, (last - first) * C),
               t[1].flat((first - r.rows.position) * C, (last - first) * C));
}

class DerivingRows {
  public:
    DerivingRows(PartLists& lists, Drafting& draft, Placing& placing)
        : lists_(lists), part_(*lists.part), draft_(draft), placing_(placing) {}

    void run() {
        PartSizes whole = lists_.sizes;
        whole.split.sequence_parallel = false;
        Drafting rows(part_, whole);
        for (const Node& node : part_.nodes) draft_rows(rows, node);
        Draft calls = std::exchange(rows.calls, {});
        place_rows(rows);
        rows.finish_output(calls, true);
        lists_.rows = placing_(rows, calls, [](const DraftCall&, const Operand&) { return Extent::rows; });
        number_storages(lists_.rows, rows);
        derive_rows_of_all(whole);
    }

  private:
    void draft_rows(Drafting& rows, const Node& node) {
        if (node.operation->has_cache) {
            const Storage& kept = draft_.storage(draft_.value(node.in[0]).storage);
            rows.set_cache(static_cast<int>(rows.storages.size()));
            rows.storages.push_back({.name = "the cache",
                                     .dtype = kept.dtype,
                                     .shape = {},
                                     .home = Space::kept,
                                     .index = kept.index,
                                     .is_fixed = true});
        }
        rows.write(node, node.operation->rows ? node.operation->rows : node.operation->forward);
    }
    // Where the forward pass keeps a value, but for what a cache is made of: that is where the cache is.
    void place_rows(Drafting& rows) {
        for (int id = 0; id < std::ssize(rows.storages); ++id) {
            Storage& storage = rows.storage(id);
            const bool is_free = storage.home == Space::scratch || storage.is_fixed;
            if (!is_free || storage.name == "the cache") continue;
            const auto same = std::ranges::find_if(draft_.storages, [&](const Storage& other) {
                return other.home == Space::kept && other.name == storage.name;
            });
            const bool is_cached = std::ranges::any_of(part_.nodes, [&](const Node& node) {
                return node.operation->has_cache && node.in[0] == storage.value;
            });
            if (same == draft_.storages.end() || is_cached) continue;
            storage.home = Space::kept;
            storage.index = same->index;
        }
    }

    // With the inputs of all rows kept, what comes before the keys and values is made of all of them.
    void derive_rows_of_all(const PartSizes& whole) {
        std::set<int> before;
        for (const Node& node : part_.nodes) {
            if (node.operation->has_cache) before.insert(node.in[0]);
        }
        if (before.empty() || part_.input < 0) return;
        for (const Node& node : std::views::reverse(part_.nodes)) {
            if (std::ranges::any_of(node.out, [&](int value) { return before.contains(value); }))
                before.insert(node.in.begin(), node.in.end());
        }
        Drafting rows(part_, whole);
        const Ref input = rows.value(part_.input);
        rows.set_sizes(lists_.sizes);
        const Ref kept_input{rows.make(part_.input, Space::kept_input)};
        const bool divides = rows.divides_tokens();
        rows.calls.push_back(copy_call(
            part_.nodes.front(), rows.operand(kept_input, Access::write, part_.input),
            rows.operand(input, Access::read, part_.input), divides ? keep_rows<true> : keep_rows<false>));
        std::set<int> known = {kept_input.storage};
        for (const Node& node : part_.nodes) {
            const bool is_before =
                std::ranges::any_of(node.out, [&](int value) { return before.contains(value); });
            rows.set_sizes(is_before ? lists_.sizes : whole);
            rows.value(part_.input) = is_before ? kept_input : input;
            const auto first = static_cast<int>(rows.storages.size());
            draft_rows(rows, node);
            if (!is_before && !node.operation->has_cache) continue;
            for (int made = first; made < std::ssize(rows.storages); ++made) known.insert(made);
        }
        Draft calls = std::exchange(rows.calls, {});
        place_rows(rows);
        rows.finish_output(calls, true);
        lists_.rows_of_all = placing_(rows, calls, [&](const DraftCall& call, const Operand& operand) {
            if (!known.contains(operand.index)) return Extent::rows;
            const bool is_before =
                call.node->operation->has_cache ||
                std::ranges::any_of(call.node->out, [&](int value) { return before.contains(value); });
            if (!is_before) return Extent::tail;
            const int value = rows.storage(operand.index).value;
            const bool is_own = divides && value >= 0 && part_.value(value).placement == Placement::stream;
            return is_own || call.run == keep_rows<false> || (divides && call.is_exchange) ? Extent::one
                                                                                           : Extent::known;
        });
        number_storages(lists_.rows_of_all, rows);
    }

    // Behind those of the other lists.
    void number_storages(List& list, const Drafting& rows) {
        const auto first = static_cast<int>(lists_.storages.size());
        for (const Storage& storage : rows.storages) lists_.storages.push_back(storage.name);
        for (ListCall& call : list) {
            for (ListOperand& operand : call.operands) operand.storage += operand.storage < 0 ? 0 : first;
        }
    }

    PartLists& lists_;
    const Part& part_;
    Drafting& draft_;
    Placing& placing_;
};

}  // namespace

void derive_rows(PartLists& lists, Drafting& draft, Placing& placing) {
    DerivingRows(lists, draft, placing).run();
}

}  // namespace llmc
