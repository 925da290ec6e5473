#include "llmc/model/part_lists.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {

namespace {

// A value, or a gradient, while a part runs: where it is, and how often that was changed by then.
struct Ref {
    int storage = -1, version = 0;
    bool is_own_tokens = false;
    auto operator<=>(const Ref&) const = default;
};

// Memory of a draft, before it is decided where that lies.
struct Storage {
    std::string name, label;
    DType dtype = DType::fp32;
    Shape shape{};           // on this rank
    std::int64_t width = 0;  // of its values on all ranks together
    Space home = Space::scratch;
    int index = 0;   // among its home's
    int value = -1;  // that it was made for
    int versions = 1;
    bool is_fixed = false;  // no batch in its shape
};

struct DraftCall {
    const Node* node;
    std::string_view name;
    RunCall run;
    std::vector<Operand> operands;
    std::uint64_t bytes = 0;
    bool is_exchange = false;
    std::vector<Extent> extents{};
};
using Draft = std::vector<DraftCall>;

bool writes(const Operand& operand) {
    return operand.access == Access::write || operand.access == Access::add;
}
bool is_storage(const Operand& operand) { return operand.kind == Operand::Kind::storage; }
bool reads(const Operand& operand) {
    return is_storage(operand) && (operand.access == Access::read || operand.access == Access::add);
}
// What an operand that is changed in place takes is the version before.
Ref read_of(const Operand& operand) {
    return {operand.index, operand.version - (operand.access == Access::add ? 1 : 0), operand.is_own_tokens};
}

constexpr RunCall run_copy = [](const Running& r, const Tensor* t) { r.ops.copy(t[0], t[1]); };
constexpr RunCall run_add = [](const Running& r, const Tensor* t) { r.ops.add(t[0], t[0], t[1]); };
constexpr RunCall run_zero = [](const Running& r, const Tensor* t) { r.ops.fill(t[0], 0.0F); };
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

class Drafting final : public Calls {
  public:
    Drafting(const Part& part, const PartSizes& sizes)
        : Calls(sizes), part_(part), values_(part.values.size()), gradients_(part.values.size()) {
        if (part.input >= 0) values_[index(part.input)] = {make(part.input, Space::input)};
    }

    Draft calls;
    std::vector<Storage> storages;

    Ref& value(int id) { return *values_[index(id)]; }
    std::optional<Ref>& gradient_of(int id) { return gradients_[index(id)]; }
    Storage& storage(int id) { return storages[index(id)]; }

    void forward(const Node& node) { visit(node, node.operation->forward); }
    void rows(const Node& node) {
        visit(node, node.operation->rows ? node.operation->rows : node.operation->forward);
    }
    void backward(const Node& node) { visit(node, node.operation->backward); }
    void remake(const Node& node) {
        remakes_ = true;
        visit(node, node.operation->remake);
        remakes_ = false;
    }
    // The losses alone, where they are with their gradients.
    void remake_losses(const Node& node) {
        remakes_ = true;
        visit(node, node.operation->forward);
        remakes_ = false;
    }
    void set_sizes(const PartSizes& sizes) { sizes_ = sizes; }

    int make(int value, Space home) {
        const Value& of = part_.value(value);
        storages.push_back({.name = of.name,
                            .label = of.label,
                            .dtype = of.is_fp32 ? DType::fp32 : sizes().dtype,
                            .shape = own_shape(of, sizes()),
                            .width = of.features(),
                            .home = home,
                            .value = value});
        return static_cast<int>(storages.size()) - 1;
    }
    int make_gradient_storage(int value, Space home) {
        const int made = make(value, home);
        storage(made).name.insert(0, "the gradient of ");
        storage(made).label.clear();
        storage(made).value = -1;
        return made;
    }
    Operand operand(const Ref& ref, Access access, int value, Makes makes = Makes::both) {
        const Storage& of = storage(ref.storage);
        Operand made{.kind = Operand::Kind::storage,
                     .access = access,
                     .makes = makes,
                     .index = ref.storage,
                     .version = ref.version,
                     .is_own_tokens = ref.is_own_tokens,
                     .shape = of.shape,
                     .dtype = of.dtype};
        if (ref.is_own_tokens)
            made.shape.resize(1,
                              part_.value(value).shape[part_.value(value).token_dim] / sizes().split.ranks);
        return made;
    }

    // ---- Calls

    Operand read(int input) override { return operand(*values_[index(in(input))], Access::read, in(input)); }
    Operand output(int place, Access access) override {
        std::optional<Ref>& ref = values_[index(out(place))];
        if (!ref || (access == Access::write && !remakes_)) ref = {make(out(place), Space::scratch)};
        return operand(*ref, access, out(place));
    }
    Operand parameter(int place) override {
        const int number = node().parameters[index(place)];
        if (number < 0) return {};
        const ParamSpec& spec = part_.parameters[index(number)].spec;
        const Shape stored = stored_shape(spec, sizes().split.ranks);
        return {.kind = Operand::Kind::parameter,
                .index = number,
                .shape = spec.is_bias ? Shape{stored.elements()} : stored,
                .dtype = sizes().dtype};
    }
    Operand local(std::string_view name, DType dtype, const Shape& shape) override {
        auto found = std::ranges::find(storages, name, &Storage::name);
        if (found == storages.end())
            found = storages.insert(found, {.name = std::string(name),
                                            .label = "",
                                            .dtype = dtype,
                                            .shape = shape,
                                            .home = Space::kept,
                                            .is_fixed = true});
        return {.kind = Operand::Kind::storage,
                .access = Access::write,
                .index = static_cast<int>(found - storages.begin()),
                .shape = shape,
                .dtype = dtype};
    }
    Operand activated(int input) override {
        const int of = part_.value(in(input)).activation_of;
        return of < 0 ? Operand{} : operand(*values_[index(of)], Access::read, of);
    }
    Operand cache(const Shape& shape) override {
        return {.kind = Operand::Kind::storage,
                .access = Access::write,
                .index = cache_,
                .shape = shape,
                .dtype = sizes().dtype};
    }
    void set_cache(int storage) { cache_ = storage; }

    void alias(int output, int input) override { values_[index(out(output))] = value(in(input)); }
    Operand in_place(int output, int input) override {
        Ref ref = value(in(input));
        ref.version = storage(ref.storage).versions++;
        values_[index(out(output))] = ref;
        return operand(ref, Access::add, out(output));
    }
    Operand own_tokens(int output, int input) override {
        const Ref of = value(in(input));
        const Ref own{of.storage, storage(of.storage).versions++, true};
        values_[index(out(output))] = own;
        return operand(own, Access::write, out(output));
    }

    Operand gradient(int output) override {
        return operand(whole_gradient(out(output)), Access::read, out(output));
    }
    Operand changed_gradient(int output) override { return change(out(output)); }
    Operand make_gradient(int input) override {
        const Ref made{make_gradient_storage(in(input), Space::scratch)};
        take_gradient(in(input), made);
        return operand(made, Access::write, in(input), Makes::input);
    }
    Operand add_gradient(int input) override {
        std::optional<Ref>& ref = gradients_[index(in(input))];
        if (!ref) {
            ref = {make_gradient_storage(in(input), Space::scratch)};
            call("fill", run_zero, {operand(*ref, Access::write, in(input), Makes::input)});
        }
        return change(in(input));
    }
    void pass_gradient(int input, int output) override {
        std::optional<Ref>& ref = gradients_[index(in(input))];
        const Ref passed = whole_gradient(out(output));
        if (!ref) {
            ref = passed;
            return;
        }
        const Operand sum = change(in(input));
        call("add", run_add, {sum, operand(passed, Access::read, out(output), Makes::input)});
    }
    Operand own_gradient(int input, int output) override {
        const Ref of = whole_gradient(out(output));
        const Ref own{of.storage, storage(of.storage).versions++, true};
        take_gradient(in(input), own);
        return operand(own, Access::write, in(input), Makes::input);
    }
    Operand parameter_gradient(int place) override {
        Operand made = parameter(place);
        if (made.kind == Operand::Kind::none) return made;
        made.kind = Operand::Kind::parameter_gradient;
        made.access = Access::add;
        made.makes = Makes::weight;
        made.dtype = DType::fp32;
        // Whole ones of a unit whose others will be summed over the ranks.
        const PartParameter& parameter = part_.parameters[index(made.index)];
        made.is_of_one = divides_tokens() && !parameter.spec.tensor_dim &&
                         sums_replicated(part_, parameter.unit) && !has_partial_gradient(part_, made.index);
        return made;
    }

    void call(std::string_view name, RunCall run, std::initializer_list<Operand> operands) override {
        calls.push_back({.node = node_, .name = name, .run = run, .operands = operands});
        // Gradients that come beside one that is there.
        for (const auto& [value, made] : std::exchange(pending_, {})) {
            const Operand sum = change(value);
            call("add", run_add, {sum, operand(made, Access::read, value, Makes::input)});
        }
    }
    void exchange(std::string_view name, RunCall run, std::initializer_list<Operand> operands,
                  std::uint64_t bytes) override {
        const std::size_t place = calls.size();
        call(name, run, operands);
        calls[place].bytes = bytes;
        calls[place].is_exchange = true;
    }

  private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    int in(int place) const { return node().in[index(place)]; }
    int out(int place) const { return node().out[index(place)]; }

    void visit(const Node& node, void (*write)(Calls&)) {
        node_ = &node;
        write(*this);
    }
    const Ref& whole_gradient(int value) const {
        const std::optional<Ref>& ref = gradients_[index(value)];
        if (!ref)
            programming_error(
                fmt::format("{}: nothing makes the gradient of {}", part_.name, part_.value(value).name));
        return *ref;
    }
    void take_gradient(int value, const Ref& made) {
        std::optional<Ref>& ref = gradients_[index(value)];
        if (ref) {
            pending_.emplace_back(value, made);
        } else {
            ref = made;
        }
    }
    // A gradient that is changed in place: apart from those of other values whose operations come later.
    Operand change(int value) {
        Ref& ref = *gradients_[index(value)];
        const auto is_needed = [&](int other) {
            return other != value && gradients_[index(other)] &&
                   gradients_[index(other)]->storage == ref.storage &&
                   (other == part_.input ||
                    std::ranges::any_of(std::span(part_.nodes.data(), node_), [&](const Node& node) {
                        return std::ranges::find(node.out, other) != node.out.end();
                    }));
        };
        for (int other = 0; other < std::ssize(part_.values); ++other) {
            if (!is_needed(other)) continue;
            const Ref copied{make_gradient_storage(value, Space::scratch)};
            call("copy", run_copy,
                 {operand(copied, Access::write, value, Makes::input),
                  operand(ref, Access::read, value, Makes::input)});
            ref = copied;
            break;
        }
        ref.version = storage(ref.storage).versions++;
        return operand(ref, Access::add, value, Makes::input);
    }

    const Part& part_;
    std::vector<std::optional<Ref>> values_, gradients_;
    std::vector<std::pair<int, Ref>> pending_;
    int cache_ = -1;
    bool remakes_ = false;
};

// Makes a part's lists from drafts of its passes.
class Deriving {
  public:
    Deriving(const Part& part, const PartSizes& sizes, Scratch& scratch)
        : part_(part), scratch_(scratch), draft_(part, sizes) {
        lists_.part = &part;
        lists_.sizes = sizes;
    }

    PartLists run() {
        for (const Node& node : part_.nodes) {
            if (!node.operation->is_forward_in_backward) draft_.forward(node);
        }
        Draft forward = std::exchange(draft_.calls, {});
        begin_backward();
        for (auto node = part_.nodes.rbegin(); node != part_.nodes.rend(); ++node) draft_.backward(*node);
        const std::size_t last = draft_.calls.size();
        finish_input_gradient();
        Draft backward = std::exchange(draft_.calls, {});
        keep_what_is_read(backward);
        finish_output(draft_, forward);
        if (part_.input >= 0 && part_.output >= 0)
            split(Draft(backward.begin(), backward.begin() + static_cast<std::ptrdiff_t>(last)), backward);

        if (part_.makes_losses()) {
            Draft losses = forward;
            draft_.remake_losses(part_.nodes.back());
            losses.insert(losses.end(), draft_.calls.begin(), draft_.calls.end());
            draft_.calls.clear();
            lists_.forward = assign(draft_, losses);
            forward.insert(forward.end(), backward.begin(), backward.end());
            lists_.backward = assign(draft_, forward);
        } else {
            lists_.forward = assign(draft_, forward);
            lists_.backward = assign(draft_, with_remakes(backward));
            recompute(forward);
        }
        derive_rows();
        for (const Storage& storage : draft_.storages) lists_.storages.push_back(storage.name);
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

    // ---- the ends of the passes

    void begin_backward() {
        if (part_.output >= 0)
            draft_.gradient_of(part_.output) = {
                draft_.make_gradient_storage(part_.output, Space::output_gradient)};
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
        draft_.calls.push_back({&part_.nodes.front(),
                                "copy",
                                run_copy,
                                {draft_.operand(to, Access::write, part_.input, Makes::input),
                                 draft_.operand(*made, Access::read, part_.input, Makes::input)}});
    }

    void finish_output(Drafting& draft, Draft& calls, bool is_one_buffer = false) {
        if (part_.output < 0) return;
        const Ref made = draft.value(part_.output);
        Storage& storage = draft.storage(made.storage);
        std::ptrdiff_t first_write = std::ssize(calls), last_read = -1;
        for (std::ptrdiff_t i = 0; i < std::ssize(calls); ++i) {
            for (const Operand& operand : calls[static_cast<std::size_t>(i)].operands) {
                if (!is_storage(operand)) continue;
                if (operand.index == made.storage) first_write = std::min(first_write, i);
                if (draft.storage(operand.index).home == Space::input) last_read = i;
            }
        }
        const bool is_late = !is_one_buffer || first_write > last_read;
        if (storage.home == Space::scratch && !made.is_own_tokens && is_late) {
            storage.home = Space::output;
            return;
        }
        const Ref to{draft.make(part_.output, Space::output)};
        calls.push_back({&part_.nodes.back(),
                         "copy",
                         run_copy,
                         {draft.operand(to, Access::write, part_.output),
                          draft.operand(made, Access::read, part_.output)}});
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
        if (part_.makes_losses()) need_all(needed);
        for (const int storage : std::set<int>(needed)) {
            if (!is_always_remade(storage)) continue;
            draft_.remake(*remaker_of(storage));
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

    void need_all(std::set<int>& needed) {
        for (int id = 0; id < std::ssize(draft_.storages); ++id) {
            if (draft_.storage(id).value >= 0 && draft_.storage(id).home == Space::scratch) needed.insert(id);
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
            if (draft_.storage(made.storage).home == Space::kept) draft_.remake(node);
        }
        lists_.recompute_cheap = assign(draft_, std::exchange(draft_.calls, {}));

        // Of the forward pass what leads to something that is kept.
        std::set<int> needed;
        Draft again;
        for (auto call = forward.rbegin(); call != forward.rend(); ++call) {
            const bool is_needed = std::ranges::any_of(call->operands, [&](const Operand& operand) {
                return is_storage(operand) && writes(operand) &&
                       (draft_.storage(operand.index).home == Space::kept || needed.contains(operand.index));
            });
            if (!is_needed) continue;
            for (const Operand& operand : call->operands) {
                if (reads(operand)) needed.insert(operand.index);
            }
            again.insert(again.begin(), *call);
        }
        lists_.recompute = assign(draft_, again);
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
        lists_.backward_input = assign(draft_, with_remakes(input));
        lists_.backward_weight = assign(draft_, with_remakes(weight));
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
                input.insert(first_after(input, needed),
                             {operand_node(input, needed), "copy", run_copy, {to, from}});
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
    // Behind the call that makes it; at the beginning, where none does.
    static Draft::iterator first_after(Draft& calls, const Ref& made) {
        const auto maker =
            std::ranges::find_if(calls, [&](const DraftCall& call) { return makes(call, made); });
        return maker == calls.end() ? calls.begin() : maker + 1;
    }
    const Node* operand_node(Draft& calls, const Ref& made) const {
        const auto maker =
            std::ranges::find_if(calls, [&](const DraftCall& call) { return makes(call, made); });
        return maker == calls.end() ? &part_.nodes.back() : maker->node;
    }
    static bool makes(const DraftCall& call, const Ref& made) {
        return std::ranges::any_of(call.operands, [&](const Operand& operand) {
            return is_storage(operand) && writes(operand) &&
                   Ref{operand.index, operand.version, operand.is_own_tokens} == made;
        });
    }

    // ---- generation

    void derive_rows() {
        PartSizes whole = lists_.sizes;
        whole.split.sequence_parallel = false;
        Drafting rows(part_, whole);
        for (const Node& node : part_.nodes) draft_rows(rows, node);
        Draft calls = std::exchange(rows.calls, {});
        place_rows(rows, {});
        finish_output(rows, calls, true);
        lists_.rows = assign(rows, calls, [](const DraftCall&, const Operand&) { return Extent::rows; });
        derive_rows_of_all(whole);
    }

    void draft_rows(Drafting& rows, const Node& node) {
        if (node.operation->has_cache) {
            const Storage& kept = draft_.storage(draft_.value(node.in[0]).storage);
            rows.set_cache(static_cast<int>(rows.storages.size()));
            rows.storages.push_back({.name = "the cache",
                                     .label = "",
                                     .dtype = kept.dtype,
                                     .shape = {},
                                     .home = Space::kept,
                                     .index = kept.index,
                                     .is_fixed = true});
        }
        rows.rows(node);
    }
    // Where the forward pass keeps a value, but for what a cache is made of: that is where the cache is.
    void place_rows(Drafting& rows, const std::set<int>& placed) {
        for (int id = 0; id < std::ssize(rows.storages); ++id) {
            Storage& storage = rows.storage(id);
            if (placed.contains(id) || (storage.home != Space::scratch && !storage.is_fixed)) continue;
            if (storage.name == "the cache") continue;
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
        const auto cached =
            std::ranges::find_if(part_.nodes, [](const Node& node) { return node.operation->has_cache; });
        if (cached == part_.nodes.end() || part_.input < 0) return;
        std::set<int> before = {cached->in[0]};
        for (auto node = std::make_reverse_iterator(cached); node != part_.nodes.rend(); ++node) {
            if (std::ranges::any_of(node->out, [&](int value) { return before.contains(value); }))
                before.insert(node->in.begin(), node->in.end());
        }
        Drafting rows(part_, whole);
        const Ref input = rows.value(part_.input);
        rows.set_sizes(lists_.sizes);
        const Ref kept_input{rows.make(part_.input, Space::kept_input)};
        const bool divides = rows.divides_tokens();
        rows.calls.push_back({&part_.nodes.front(),
                              "copy",
                              divides ? keep_rows<true> : keep_rows<false>,
                              {rows.operand(kept_input, Access::write, part_.input),
                               rows.operand(input, Access::read, part_.input)}});
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
        place_rows(rows, {});
        finish_output(rows, calls, true);
        lists_.rows_of_all = assign(rows, calls, [&](const DraftCall& call, const Operand& operand) {
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
    }

    // ---- places

    template <class ExtentOf>
    List assign(Drafting& draft, const Draft& calls, ExtentOf&& extent_of) {
        std::map<int, std::size_t> last;  // by storage, the last call that uses it
        for (std::size_t i = 0; i < calls.size(); ++i) {
            for (const Operand& operand : calls[i].operands) {
                if (is_storage(operand)) last[operand.index] = i;
            }
        }
        std::map<int, int> placed;  // scratch buffers, by storage
        List list;
        for (std::size_t i = 0; i < calls.size(); ++i) {
            const DraftCall& call = calls[i];
            ListCall& made = list.emplace_back(ListCall{call.node, call.name, call.run, {}, call.bytes});
            for (const Operand& operand : call.operands)
                made.operands.push_back(place(draft, operand, call, placed, extent_of));
            std::erase_if(placed, [&](const auto& buffer) { return last[buffer.first] == i; });
        }
        return list;
    }
    List assign(Drafting& draft, const Draft& calls) {
        return assign(draft, calls, [](const DraftCall&, const Operand&) { return Extent::batch; });
    }

    template <class ExtentOf>
    ListOperand place(Drafting& draft, const Operand& operand, const DraftCall& call,
                      std::map<int, int>& placed, ExtentOf&& extent_of) {
        ListOperand made{.extent = Extent::fixed,
                         .access = operand.access,
                         .is_own_tokens = operand.is_own_tokens,
                         .is_of_one = operand.is_of_one,
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
            case Operand::Kind::tokens:
            case Operand::Kind::targets:
                made.space = operand.kind == Operand::Kind::tokens ? Space::tokens : Space::targets;
                made.shape = {lists_.sizes.batch, part_.tokens};
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
        if (!storage.is_fixed) made.extent = extent_of(call, operand);
        return made;
    }

    // The first buffer of its width that is free.
    int scratch_place(const Storage& storage, int id, std::map<int, int>& placed) {
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

    const Part& part_;
    Scratch& scratch_;
    Drafting draft_;
    PartLists lists_;
    std::map<int, Draft> remakes_;
    std::map<Ref, Ref> kept_gradients_;
    std::vector<int> moved_;
};

}  // namespace

Shape own_shape(const Value& value, const PartSizes& sizes) {
    const Shape& whole = value.shape;
    Shape own{sizes.batch, whole[0]};
    if (whole.dimensions() == 2) own = {sizes.batch, whole[0], whole[1]};
    if (whole.dimensions() == 3) own = {sizes.batch, whole[0], whole[1], whole[2]};
    if (whole.dimensions() == 4) own = {sizes.batch, whole[0], whole[1], whole[2], whole[3]};
    const int token_dim = value.token_dim + 1, divided_dim = value.divided_dim + 1;
    if (value.placement == Placement::stream) own.resize(token_dim, sizes.split.tokens(own[token_dim]));
    if (value.placement == Placement::divided) own.resize(divided_dim, own[divided_dim] / sizes.split.ranks);
    return own;
}

PartLists derive_lists(const Part& part, const PartSizes& sizes, Scratch& scratch) {
    return Deriving(part, sizes, scratch).run();
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
    const auto at = [&](std::span<std::byte* const> buffers) {
        return buffers[static_cast<std::size_t>(operand.index)];
    };
    Tensor tensor{nullptr, operand.dtype, operand.shape};
    if (operand.is_of_one && running.ranks.rank() != 0) return {};
    switch (operand.space) {
        case Space::none:
            return {};
        case Space::input:
            tensor.data = memory.input;
            break;
        case Space::output:
            tensor.data = memory.output;
            break;
        case Space::input_gradient:
            tensor.data = memory.input_gradient;
            break;
        case Space::output_gradient:
            tensor.data = memory.output_gradient;
            break;
        case Space::kept_input:
            tensor.data = memory.kept_input;
            break;
        case Space::kept:
            tensor.data = at(memory.kept);
            break;
        case Space::scratch:
            tensor.data = at(memory.scratch);
            break;
        case Space::kept_gradient:
            tensor.data = at(memory.kept_gradients);
            break;
        case Space::parameter:
            tensor.data = at(memory.parameters);
            break;
        case Space::parameter_gradient:
            tensor.data = at(memory.parameter_gradients);
            break;
        case Space::tokens:
            tensor.data = memory.tokens;
            break;
        case Space::targets:
            tensor.data = memory.targets;
            break;
    }
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

void run_list(const List& list, const PartMemory& memory, std::int64_t sequences, const Running& running) {
    constexpr std::size_t most_operands = 10;
    std::array<Tensor, most_operands> tensors;
    for (const ListCall& call : list) {
        Running with_node = running;
        with_node.node = call.node;
        for (std::size_t i = 0; i < call.operands.size(); ++i)
            tensors[i] = tensor_of(call.operands[i], memory, sequences, running);
        call.run(with_node, tensors.data());
    }
}

}  // namespace llmc
