// Makes a part's lists from drafts of its passes (part_lists.h).
#include "llmc/model/derive_lists.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/standard_library.h"
#include "llmc/model/draft.h"

namespace llmc {

namespace {

class Deriving {
  public:
    Deriving(const Part& part, const PartSizes& sizes, Scratch& scratch)
        : part_(part), draft_(part, sizes), placing_(part, draft_.sizes(), scratch) {
        lists_.part = &part;
        lists_.sizes = sizes;
    }

    PartLists run() {
        for (const Node& node : part_.nodes) {
            if (!node.operation->is_forward_in_backward) draft_.write(node, node.operation->forward);
        }
        Draft forward = std::exchange(draft_.calls, {});
        if (part_.output >= 0)
            draft_.gradient_of(part_.output) = {
                draft_.make_gradient_storage(part_.output, Space::output_gradient)};
        for (const Node& node : Reversed(part_.nodes)) draft_.write(node, node.operation->backward);
        const std::size_t last = draft_.calls.size();
        finish_input_gradient();
        Draft backward = std::exchange(draft_.calls, {});
        keep_what_is_read(backward);
        draft_.finish_output(forward);
        if (part_.input >= 0 && part_.output >= 0)
            split(Draft(backward.begin(), backward.begin() + static_cast<std::ptrdiff_t>(last)), backward);

        if (part_.makes_losses()) {
            Draft losses = forward;
            // The losses without gradients.
            draft_.write(part_.nodes.back(), part_.nodes.back().operation->forward, true);
            losses.insert(losses.end(), draft_.calls.begin(), draft_.calls.end());
            draft_.calls.clear();
            lists_.forward = placing_(draft_, losses);
            forward.insert(forward.end(), backward.begin(), backward.end());
            lists_.backward = placing_(draft_, forward);
        } else {
            lists_.forward = placing_(draft_, forward);
            lists_.backward = placing_(draft_, with_recomputes(backward));
            recompute(forward);
        }
        for (const Storage& storage : draft_.storages) lists_.storages.push_back(storage.name);
        derive_rows(lists_, draft_, placing_);
        return std::move(lists_);
    }

  private:
    const Node* producer_of(int value) const {
        const auto found = std::ranges::find_if(part_.nodes, [&](const Node& node) {
            return std::ranges::find(node.out, value) != node.out.end();
        });
        return found == part_.nodes.end() ? nullptr : &*found;
    }
    // The operation that can recompute a storage of the forward pass; null if there is none. A value whose
    // memory becomes the cache of generation counts as having none, so every layer keeps it.
    const Node* recomputer_of(int storage) {
        const int value = draft_.storage(storage).value;
        const Node* node = value < 0 ? nullptr : producer_of(value);
        const int recomputed = node ? node->operation->recomputed : -1;
        if (recomputed < 0 || node->out[static_cast<std::size_t>(recomputed)] != value) return nullptr;
        if (draft_.storage(storage).versions > 1) return nullptr;  // others have changed it since
        const auto caches = [&](const Node& other) {
            return other.operation->has_cache && draft_.value(other.in[0]).storage == storage;
        };
        return std::ranges::any_of(part_.nodes, caches) ? nullptr : node;
    }
    bool is_always_recomputed(int storage) {
        const Node* node = recomputer_of(storage);
        return node && node->operation->is_always_recomputed && !part_.makes_losses();
    }

    void finish_input_gradient() {
        if (part_.input < 0) return;
        const auto made = draft_.gradient_of(part_.input);
        if (!made) programming_error(fmt::format("{}: no operation reads the part's input", part_.name));
        Storage& storage = draft_.storage(made->storage);
        const bool one_buffer = part_.input_width() == part_.output_width();
        if (storage.home == Space::output_gradient && one_buffer && !made->is_own_tokens) return;
        if (storage.home == Space::scratch && !one_buffer && !made->is_own_tokens) {
            storage.home = Space::input_gradient;
            return;
        }
        const Ref to{draft_.make_gradient_storage(part_.input, Space::input_gradient)};
        draft_.calls.push_back(copy_call(part_.nodes.front(),
                                         draft_.operand(to, Access::write, part_.input, Half::input),
                                         draft_.operand(*made, Access::read, part_.input, Half::input)));
    }

    // ---- the values that are kept

    void keep(int id) {
        Storage& storage = draft_.storage(id);
        const Node* recomputer = recomputer_of(id);
        storage.home = Space::kept;
        storage.index = static_cast<int>(lists_.kept.size());
        lists_.kept.push_back({storage.name, storage.label, storage.dtype, storage.shape,
                               recomputer != nullptr, storage.value});
    }

    void keep_what_is_read(const Draft& backward) {
        std::set<int> needed;
        const auto need = [&](const Draft& calls) {
            for (const DraftCall& call : calls) {
                for (const Operand& operand : call.operands) {
                    const bool of_losses = call.node->operation->is_forward_in_backward && writes(operand);
                    const bool is_made_before = reads(operand) && draft_.storage(operand.index).value >= 0;
                    if (is_storage(operand) && (of_losses || is_made_before)) needed.insert(operand.index);
                }
            }
        };
        need(backward);
        // If both passes are one list, all values are kept.
        for (int id = 0; part_.makes_losses() && id < std::ssize(draft_.storages); ++id) {
            if (draft_.storage(id).value >= 0 && draft_.storage(id).home == Space::scratch) needed.insert(id);
        }
        for (const int storage : std::set<int>(needed)) {
            if (!is_always_recomputed(storage)) continue;
            const Node* node = recomputer_of(storage);
            draft_.write(*node, node->operation->recompute, true);
            need(draft_.calls);
            recomputes_[storage] = std::exchange(draft_.calls, {});
        }
        for (const int storage : needed) {
            const Space home = draft_.storage(storage).home;
            if ((home == Space::scratch || home == Space::kept) && !is_always_recomputed(storage))
                keep(storage);
        }
        if (!part_.makes_losses()) return;
        const Node& losses = part_.nodes.back();
        for (const Storage& storage : draft_.storages) {
            if (storage.value == losses.out[0]) lists_.losses = storage.index;
            if (storage.is_local(&losses, draft_.is_shared() ? "all columns" : "logits"))
                lists_.logits = storage.index;
        }
    }

    // The calls. Each call that reads a value that is never kept comes after the calls that recompute it.
    Draft with_recomputes(const Draft& calls) const {
        Draft all;
        for (const DraftCall& call : calls) {
            for (const Operand& operand : call.operands) {
                if (!reads(operand)) continue;
                if (const auto found = recomputes_.find(operand.index); found != recomputes_.end())
                    all.insert(all.end(), found->second.begin(), found->second.end());
            }
            all.push_back(call);
        }
        return all;
    }

    void recompute(const Draft& forward) {
        for (const Node& node : part_.nodes) {
            if (node.operation->recomputed < 0) continue;
            const int made =
                draft_.value(node.out[static_cast<std::size_t>(node.operation->recomputed)]).storage;
            if (draft_.storage(made).home == Space::kept && recomputer_of(made) == &node)
                draft_.write(node, node.operation->recompute, true);
        }
        lists_.recompute_cheap = placing_(draft_, std::exchange(draft_.calls, {}));

        // The calls of the forward pass that lead to a kept value.
        std::set<int> needed;
        Draft again;
        for (const DraftCall& call : Reversed(forward)) {
            const bool is_needed = std::ranges::any_of(call.operands, [&](const Operand& operand) {
                return is_storage(operand) && writes(operand) &&
                       (draft_.storage(operand.index).home == Space::kept || needed.contains(operand.index));
            });
            if (!is_needed) continue;
            for (const Operand& operand : call.operands) {
                if (reads(operand)) needed.insert(operand.index);
            }
            again.insert(again.begin(), call);
        }
        // By then the next part holds this part's output. A call that makes both this output and a kept value
        // writes the output to scratch memory.
        for (Storage& storage : draft_.storages) {
            if (storage.home == Space::output) storage.home = Space::scratch;
        }
        lists_.recompute = placing_(draft_, again);
    }

    // ---- the backward pass in two halves

    std::vector<Operand> operands_for(const DraftCall& call, Half half) {
        std::vector<Operand> operands = call.operands;
        for (Operand& operand : operands) {
            if (operand.half == Half::both || operand.half == half) continue;
            // The shapes of the matrix, which may be a copy in local memory, and of the product's input
            // determine the shape of the result.
            const bool is_copy = is_storage(operand) && draft_.storage(operand.index).local_of;
            const bool says_shape =
                operand.access == Access::read &&
                (operand.kind == Operand::Kind::parameter || is_copy || half == Half::input);
            if (says_shape) {
                operand.access = Access::shape;
            } else {
                operand = {};
            }
        }
        return operands;
    }
    // Local memory that both halves read is made in each.
    bool makes_something(const DraftCall& call, Half half) {
        return std::ranges::any_of(call.operands, [&](const Operand& operand) {
            const bool is_for_both =
                operand.half == Half::both && is_storage(operand) && draft_.storage(operand.index).local_of;
            return writes(operand) && (operand.half == half || is_for_both);
        });
    }

    // Splits the backward pass into two halves. `calls` lacks the last copy, which `all` has.
    void split(const Draft& calls, const Draft& all) {
        Draft input, weight;
        for (const DraftCall& call : all) {
            if (!makes_something(call, Half::input)) continue;
            input.push_back(call);
            input.back().operands = operands_for(call, Half::input);
        }
        std::map<Ref, DraftCall> exchanged;  // gradients that the second half exchanges again
        for (const DraftCall& call : calls) {
            if (call.is_exchange && call.operands[0].access == Access::write &&
                !call.operands[0].is_own_tokens)
                exchanged[{call.operands[0].index, 0}] = call;
            if (!makes_something(call, Half::weight)) continue;
            DraftCall made = call;
            made.operands = operands_for(call, Half::weight);
            made.bytes = 0;  // the first half has sent them
            for (Operand& operand : made.operands) {
                // Values are kept, and local memory is filled again.
                if (!reads(operand) || draft_.storage(operand.index).value >= 0 ||
                    draft_.storage(operand.index).local_of)
                    continue;
                if (const auto again = exchanged.find(read_of(operand)); again != exchanged.end()) {
                    DraftCall exchange = again->second;
                    keep_gradient(input, exchange.operands[1]);
                    weight.push_back(std::move(exchange));
                } else {
                    keep_gradient(input, operand);
                }
            }
            weight.push_back(std::move(made));
        }
        lists_.backward_input = placing_(draft_, with_recomputes(input));
        lists_.backward_weight = placing_(draft_, with_recomputes(weight));
        // If the backward pass runs as one list, the values that pass from the first half to the second lie
        // in scratch memory.
        for (const int storage : moved_) draft_.storage(storage).home = Space::scratch;
    }

    // Lets `operand` of the second half read a gradient of the first half: from its own buffer, or from a
    // copy if that buffer is overwritten later.
    void keep_gradient(Draft& input, Operand& operand) {
        const Ref needed = read_of(operand);
        auto found = kept_gradients_.find(needed);
        if (found == kept_gradients_.end()) {
            Storage& storage = draft_.storage(needed.storage);
            const bool is_final = needed.version + 1 == storage.versions;
            int kept = needed.storage;
            if (storage.home == Space::scratch && is_final && !needed.is_own_tokens) {
                storage.home = Space::kept_gradient;
                moved_.push_back(kept);
            } else {
                kept = static_cast<int>(draft_.storages.size());
                Storage copy = storage;
                copy.name += needed.version > 0 ? fmt::format(" ({})", needed.version) : "";
                copy.shape = operand_shape(needed, operand);
                copy.home = Space::kept_gradient;
                copy.versions = 1;
                draft_.storages.push_back(copy);
                Operand from = operand.as(copy.shape);
                from.access = Access::read;
                from.version = from.read_version = needed.version;
                const Operand to{.kind = Operand::Kind::storage,
                                 .access = Access::write,
                                 .half = Half::input,
                                 .index = kept,
                                 .shape = copy.shape,
                                 .dtype = copy.dtype};
                // The copy comes after the call that makes the gradient, or at the beginning if no call does.
                const auto maker =
                    std::ranges::find_if(input, [&](const DraftCall& call) { return makes(call, needed); });
                const bool is_made = maker != input.end();
                const Node& node = is_made ? *maker->node : part_.nodes.back();
                input.insert(is_made ? maker + 1 : input.begin(), copy_call(node, to, from));
            }
            Storage& home = draft_.storage(kept);
            home.index = static_cast<int>(lists_.kept_gradients.size());
            lists_.kept_gradients.push_back({home.name, "", home.dtype, home.shape});
            found = kept_gradients_.emplace(needed, Ref{kept, home.versions - 1}).first;
        }
        operand.index = found->second.storage;
        operand.version = operand.read_version = found->second.version;
        operand.is_own_tokens = false;
    }
    Shape operand_shape(const Ref& needed, const Operand& operand) {
        Shape shape = draft_.storage(needed.storage).shape;
        if (needed.is_own_tokens) shape.resize(1, operand.shape[1]);
        return shape;
    }
    static bool makes(const DraftCall& call, const Ref& made) {
        return std::ranges::any_of(call.operands, [&](const Operand& operand) {
            return is_storage(operand) && writes(operand) &&
                   Ref{operand.index, operand.version, operand.is_own_tokens} == made;
        });
    }

    const Part& part_;
    Calls draft_;
    Placing placing_;
    PartLists lists_;
    std::map<int, Draft> recomputes_;
    std::map<Ref, Ref> kept_gradients_;
    std::vector<int> moved_;
};

}  // namespace

PartLists derive_lists(const Part& part, const PartSizes& sizes, Scratch& scratch) {
    return Deriving(part, sizes, scratch).run();
}

}  // namespace llmc
