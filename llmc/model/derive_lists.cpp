// Makes a part's lists from drafts of its passes (part_lists.h).
#include <algorithm>
#include <map>
#include <ranges>
#include <set>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/model/derive_rows.h"
#include "llmc/model/draft.h"
#include "llmc/model/place_calls.h"

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
        for (const Node& node : std::views::reverse(part_.nodes))
            draft_.write(node, node.operation->backward);
        const std::size_t last = draft_.calls.size();
        finish_input_gradient();
        Draft backward = std::exchange(draft_.calls, {});
        keep_what_is_read(backward);
        draft_.finish_output(forward);
        if (part_.input >= 0 && part_.output >= 0)
            split(Draft(backward.begin(), backward.begin() + static_cast<std::ptrdiff_t>(last)), backward);

        if (part_.makes_losses()) {
            Draft losses = forward;
            draft_.write(part_.nodes.back(), part_.nodes.back().operation->forward,
                         true);  // the losses alone
            losses.insert(losses.end(), draft_.calls.begin(), draft_.calls.end());
            draft_.calls.clear();
            lists_.forward = placing_(draft_, losses);
            forward.insert(forward.end(), backward.begin(), backward.end());
            lists_.backward = placing_(draft_, forward);
        } else {
            lists_.forward = placing_(draft_, forward);
            lists_.backward = placing_(draft_, with_remakes(backward));
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
    // The operation that writes a storage of the forward pass again; null where none does.
    const Node* remaker_of(int storage) {
        const int value = draft_.storage(storage).value;
        const Node* node = value < 0 ? nullptr : producer_of(value);
        const int remade = node ? node->operation->remade : -1;
        return remade >= 0 && node->out[static_cast<std::size_t>(remade)] == value ? node : nullptr;
    }
    bool is_always_remade(int storage) {
        const Node* node = remaker_of(storage);
        return node && node->operation->is_always_remade && !part_.makes_losses();
    }

    void finish_input_gradient() {
        if (part_.input < 0) return;
        const auto made = draft_.gradient_of(part_.input);
        check(made.has_value(), "the gradient of a part's input");
        Storage& storage = draft_.storage(made->storage);
        const bool one_buffer = part_.input_width() == part_.output_width();
        if (storage.home == Space::output_gradient && one_buffer && !made->is_own_tokens) return;
        if (storage.home == Space::scratch && !one_buffer && !made->is_own_tokens) {
            storage.home = Space::input_gradient;
            return;
        }
        const Ref to{draft_.make_gradient_storage(part_.input, Space::input_gradient)};
        draft_.calls.push_back(copy_call(part_.nodes.front(),
                                         draft_.operand(to, Access::write, part_.input, Makes::input),
                                         draft_.operand(*made, Access::read, part_.input, Makes::input)));
    }

    // ---- what is kept

    void keep(int id) {
        Storage& storage = draft_.storage(id);
        const Node* remaker = remaker_of(id);
        storage.home = Space::kept;
        storage.index = static_cast<int>(lists_.kept.size());
        lists_.kept.push_back(
            {storage.name, storage.label, storage.dtype, storage.shape, remaker != nullptr});
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
        // Where both passes are one list, all of it.
        for (int id = 0; part_.makes_losses() && id < std::ssize(draft_.storages); ++id) {
            if (draft_.storage(id).value >= 0 && draft_.storage(id).home == Space::scratch) needed.insert(id);
        }
        for (const int storage : std::set<int>(needed)) {
            if (!is_always_remade(storage)) continue;
            const Node* node = remaker_of(storage);
            draft_.write(*node, node->operation->remake, true);
            need(draft_.calls);
            remakes_[storage] = std::exchange(draft_.calls, {});
        }
        for (const int storage : needed) {
            const Space home = draft_.storage(storage).home;
            if ((home == Space::scratch || home == Space::kept) && !is_always_remade(storage)) keep(storage);
        }
        for (std::size_t i = 0; i < lists_.kept.size(); ++i) {
            if (lists_.kept[i].name == "losses") lists_.losses = static_cast<int>(i);
            if (lists_.kept[i].name == (draft_.is_shared() ? "all columns" : "logits"))
                lists_.logits = static_cast<int>(i);
        }
    }

    // With the calls before each that make again what is never kept.
    Draft with_remakes(const Draft& calls) const {
        Draft all;
        for (const DraftCall& call : calls) {
            for (const Operand& operand : call.operands) {
                if (!reads(operand)) continue;
                if (const auto found = remakes_.find(operand.index); found != remakes_.end())
                    all.insert(all.end(), found->second.begin(), found->second.end());
            }
            all.push_back(call);
        }
        return all;
    }

    void recompute(const Draft& forward) {
        for (const Node& node : part_.nodes) {
            if (node.operation->remade < 0 || node.operation->is_always_remade) continue;
            const Ref made = draft_.value(node.out[static_cast<std::size_t>(node.operation->remade)]);
            if (draft_.storage(made.storage).home == Space::kept)
                draft_.write(node, node.operation->remake, true);
        }
        lists_.recompute_cheap = placing_(draft_, std::exchange(draft_.calls, {}));

        // Of the forward pass what leads to something that is kept.
        std::set<int> needed;
        Draft again;
        for (const DraftCall& call : std::views::reverse(forward)) {
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
        lists_.recompute = placing_(draft_, again);
    }

    // ---- the backward pass in two parts

    static std::vector<Operand> of_part(const DraftCall& call, Makes part) {
        std::vector<Operand> operands = call.operands;
        for (Operand& operand : operands) {
            if (operand.makes == Makes::both || operand.makes == part) continue;
            // A matrix and a product's input say how large the result is.
            const bool says_shape = operand.access == Access::read &&
                                    (operand.kind == Operand::Kind::parameter || part == Makes::input);
            if (says_shape) {
                operand.access = Access::shape;
            } else {
                operand = {};
            }
        }
        return operands;
    }
    static bool makes_something(const DraftCall& call, Makes part) {
        return std::ranges::any_of(
            call.operands, [&](const Operand& operand) { return writes(operand) && operand.makes == part; });
    }

    // `calls` without the last copy; `all` with it.
    void split(const Draft& calls, const Draft& all) {
        Draft input, weight;
        for (const DraftCall& call : all) {
            if (!makes_something(call, Makes::input)) continue;
            input.push_back(call);
            input.back().operands = of_part(call, Makes::input);
        }
        std::map<Ref, DraftCall> exchanged;  // gradients that are exchanged again
        for (const DraftCall& call : calls) {
            if (call.is_exchange && call.operands[0].access == Access::write &&
                !call.operands[0].is_own_tokens)
                exchanged[{call.operands[0].index, 0}] = call;
            if (!makes_something(call, Makes::weight)) continue;
            DraftCall made = call;
            made.operands = of_part(call, Makes::weight);
            for (Operand& operand : made.operands) {
                if (!reads(operand) || draft_.storage(operand.index).value >= 0) continue;
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
        lists_.backward_input = placing_(draft_, with_remakes(input));
        lists_.backward_weight = placing_(draft_, with_remakes(weight));
        // A part runs in one list or in two: what crosses from one to the other is scratch memory in the one.
        for (const int storage : moved_) draft_.storage(storage).home = Space::scratch;
    }

    // What the second part reads of the first stays where it is made, or is copied before it is overwritten.
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
                from.version = needed.version;
                const Operand to{.kind = Operand::Kind::storage,
                                 .access = Access::write,
                                 .makes = Makes::input,
                                 .index = kept,
                                 .shape = copy.shape,
                                 .dtype = copy.dtype};
                // Behind the call that makes it; at the beginning, where none does.
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
        operand.version = found->second.version;
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
    Drafting draft_;
    Placing placing_;
    PartLists lists_;
    std::map<int, Draft> remakes_;
    std::map<Ref, Ref> kept_gradients_;
    std::vector<int> moved_;
};

}  // namespace

PartLists derive_lists(const Part& part, const PartSizes& sizes, Scratch& scratch) {
    return Deriving(part, sizes, scratch).run();
}

}  // namespace llmc
