// Derives the lists for generation, with keys and values kept or with a part's input kept.
#include "llmc/model/derive_lists.h"

#include <algorithm>
#include <set>

#include "llmc/core/standard_library.h"

namespace llmc {

namespace {

// Copies the new rows of a part's input to the kept input. With Own, a rank keeps only the rows of its own
// tokens.
template <bool Own>
void keep_rows(const Running& r, const Tensor* t) {
    const std::int64_t own = t[0].shape[1], C = t[0].shape[2], end = r.rows.position + r.rows.count;
    const std::int64_t first_own = Own ? r.ranks.rank() * own : 0;
    const std::int64_t first = std::max(r.rows.position, first_own), last = std::min(end, first_own + own);
    if (first >= last) return;
    r.ops.run(Copy{t[0].flat((first - first_own) * C, (last - first) * C),
                   t[1].flat((first - r.rows.position) * C, (last - first) * C)});
}

class DerivingRows {
  public:
    DerivingRows(PartLists& lists, Calls& draft, Placing& placing)
        : lists_(lists), part_(*lists.part), draft_(draft), placing_(placing), sizes_(lists.sizes) {
        // Products of bytes have multiples of 16 rows.
        if (sizes_.fp8_dtype == DType::uint8) sizes_.fp8 = Fp8Scaling::none;
    }

    void run() {
        PartSizes whole = sizes_;
        whole.split.sequence_parallel = false;
        Calls rows(part_, whole);
        for (const Node& node : part_.nodes) draft_rows(rows, node);
        Draft calls = std::exchange(rows.calls, {});
        place_rows(rows);
        rows.finish_output(calls, true);
        lists_.rows = placing_(rows, calls, [](const DraftCall&, const Operand&) { return Extent::rows; });
        number_storages(lists_.rows, rows);
        derive_rows_of_all(whole);
    }

  private:
    void draft_rows(Calls& rows, const Node& node) {
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
    // Places each value where the forward pass keeps it. Attention's keys and values are an exception: the
    // cache uses their memory.
    void place_rows(Calls& rows) {
        for (int id = 0; id < std::ssize(rows.storages); ++id) {
            Storage& storage = rows.storage(id);
            const auto same = std::ranges::find_if(draft_.storages, [&](const Storage& other) {
                return other.home == Space::kept && other.is_same(storage);
            });
            // Operations that work in place may have changed it since.
            const bool is_cached = std::ranges::any_of(part_.nodes, [&](const Node& node) {
                return node.operation->has_cache && rows.value(node.in[0]).storage == id;
            });
            if (same == draft_.storages.end() || is_cached) continue;
            storage.home = Space::kept;
            storage.index = same->index;
        }
    }

    // Derives the list for generation that keeps the inputs of all rows. The operations before the keys and
    // values then run on all rows.
    void derive_rows_of_all(const PartSizes& whole) {
        std::set<int> before;
        for (const Node& node : part_.nodes) {
            if (node.operation->has_cache) before.insert(node.in.begin(), node.in.end());
        }
        if (before.empty() || part_.input < 0) return;
        for (const Node& node : Reversed(part_.nodes)) {
            if (std::ranges::any_of(node.out, [&](int value) { return before.contains(value); }))
                before.insert(node.in.begin(), node.in.end());
        }
        Calls rows(part_, whole);
        const Ref input = rows.value(part_.input);
        rows.set_sizes(sizes_);
        const Ref kept_input{rows.make(part_.input, Space::kept_input)};
        const bool divides = rows.divides_tokens();
        rows.calls.push_back(copy_call(
            part_.nodes.front(), rows.operand(kept_input, Access::write, part_.input),
            rows.operand(input, Access::read, part_.input), divides ? keep_rows<true> : keep_rows<false>));
        std::set<int> known = {kept_input.storage};
        const auto is_before = [&](const Node& node) {
            return std::ranges::any_of(node.out, [&](int value) { return before.contains(value); });
        };
        // For each stream, what the operations before the keys and values read, and what the others read.
        std::map<int, std::pair<Ref, Ref>> streams = {{part_.input, {kept_input, input}}};
        for (const Node& node : part_.nodes) {
            for (const auto& [value, refs] : streams)
                rows.value(value) = is_before(node) ? refs.first : refs.second;
            rows.set_sizes(is_before(node) ? sizes_ : whole);
            const auto first = static_cast<int>(rows.storages.size());
            draft_rows(rows, node);
            if (!is_before(node) && !node.operation->has_cache) continue;
            for (const int value : node.out) {
                const bool is_read = std::ranges::any_of(part_.nodes, [&](const Node& other) {
                    return !is_before(other) && std::ranges::find(other.in, value) != other.in.end();
                });
                if (divides && is_read && part_.value(value).placement == Placement::stream)
                    streams[value] = {rows.value(value), gathered(rows, node, value, whole)};
            }
            for (int made = first; made < std::ssize(rows.storages); ++made) known.insert(made);
        }
        Draft calls = std::exchange(rows.calls, {});
        place_rows(rows);
        rows.finish_output(calls, true);
        lists_.rows_of_all = placing_(rows, calls, [&](const DraftCall& call, const Operand& operand) {
            if (!known.contains(operand.index)) return Extent::rows;
            if (operand.index == kept_input.storage && writes(operand)) return Extent::one;
            if (!is_before(*call.node) && !call.node->operation->has_cache) return Extent::tail;
            const bool is_own = operand.shape[1] < part_.tokens;
            return is_own || (divides && call.is_exchange) ? Extent::one : Extent::known;
        });
        number_storages(lists_.rows_of_all, rows);
    }

    // Gathers the rows of all tokens of a stream. Each rank has only the rows of its own tokens.
    static Ref gathered(Calls& rows, const Node& node, int value, const PartSizes& whole) {
        const Ref own = rows.value(value);
        rows.set_sizes(whole);
        const Ref all{rows.make(value, Space::scratch)};
        rows.storage(all.storage).value = -1;
        rows.calls.push_back(
            {.node = &node,
             .name = "all_gather",
             .run = [](const Running& r, const Tensor* t) { r.ranks.gather(t[0], t[1]); },
             .operands = {rows.operand(all, Access::write, value), rows.operand(own, Access::read, value)},
             .is_exchange = true});
        return all;
    }

    // Numbers the list's storages after those of the other lists.
    void number_storages(List& list, const Calls& rows) {
        const auto first = static_cast<int>(lists_.storages.size());
        for (const Storage& storage : rows.storages) lists_.storages.push_back(storage.name);
        for (ListCall& call : list) {
            for (ListOperand& operand : call.operands) operand.storage += operand.storage < 0 ? 0 : first;
        }
    }

    PartLists& lists_;
    const Part& part_;
    Calls& draft_;
    Placing& placing_;
    PartSizes sizes_;
};

}  // namespace

void derive_rows(PartLists& lists, Calls& draft, Placing& placing) {
    DerivingRows(lists, draft, placing).run();
}

}  // namespace llmc
