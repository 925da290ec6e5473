// Drafts of a part's passes: calls whose operands are values and gradients, before it is decided where these
// lie (placing.cpp, derive_rows.cpp). A draft is in single-assignment form: changing memory in place
// makes a new version.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/device/nf4.h"
#include "llmc/model/operand_uses.h"
#include "llmc/model/part_lists.h"

namespace llmc {

// A value or a gradient during a pass: its storage and the version, which counts the changes in place so far.
struct Ref {
    int storage = -1, version = 0;
    bool is_own_tokens = false;
    auto operator<=>(const Ref&) const = default;
};

// Memory of a draft, before it is decided where it lies.
struct Storage {
    std::string name{}, label{};
    DType dtype = DType::fp32;
    Shape shape{};           // on this rank
    std::int64_t width = 0;  // the width of its values on all ranks together
    Space home = Space::scratch;
    int index = 0;                   // in its home
    int value = -1;                  // the value for which it was made; -1: none
    const Node* local_of = nullptr;  // the node whose local memory it is, known there by `name`
    int versions = 1;
    bool is_fixed = false;  // its shape has no batch dimension

    bool is_local(const Node* node, std::string_view of) const {
        return node && local_of == node && name == of;
    }
    // Whether another draft has it for the same value, or for the same use of a node.
    bool is_same(const Storage& other) const {
        return value >= 0 ? other.value == value : other.is_local(local_of, name);
    }
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

inline bool writes(const Operand& operand) {
    return operand.access == Access::write || operand.access == Access::add;
}
inline bool is_storage(const Operand& operand) { return operand.kind == Operand::Kind::storage; }
inline bool reads(const Operand& operand) {
    return is_storage(operand) && (operand.access == Access::read || operand.access == Access::add);
}
inline Ref read_of(const Operand& operand) {
    return {operand.index, operand.read_version, operand.is_own_tokens};
}

inline DraftCall copy_call(const Node& node, const Operand& to, const Operand& from,
                           RunCall run_copy = run_op<InOrder<Copy>>) {
    return {.node = &node, .name = "copy", .run = run_copy, .operands = {to, from}};
}

// Writes the calls of nodes, one after the other. The second half of its functions is what rows of the table of
// operations use.
class Calls {
  public:
    Calls(const Part& part, const PartSizes& sizes)
        : part_(part), sizes_(sizes), values_(part.values.size()), gradients_(part.values.size()) {
        if (part.input >= 0) values_[index(part.input)] = {make(part.input, Space::input)};
    }

    Draft calls;
    std::vector<Storage> storages;

    Ref& value(int id) { return *values_[index(id)]; }
    std::optional<Ref>& gradient_of(int id) { return gradients_[index(id)]; }
    Storage& storage(int id) { return storages[index(id)]; }

    // Adds the calls of a node, with a function from the table of operations. With `recomputes`, outputs go
    // to the storages that they already have.
    void write(const Node& node, void (*calls_of)(Calls&), bool recomputes = false) {
        node_ = &node;
        recomputes_ = recomputes;
        calls_of(*this);
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
    Operand operand(const Ref& ref, Access access, int value, Half half = Half::both) {
        const Storage& of = storage(ref.storage);
        Operand made{.kind = Operand::Kind::storage,
                     .access = access,
                     .half = half,
                     .index = ref.storage,
                     .version = ref.version,
                     .read_version = ref.version,
                     .is_own_tokens = ref.is_own_tokens,
                     .shape = of.shape,
                     .dtype = of.dtype};
        const Value& whole = part_.value(value);
        if (ref.is_own_tokens) made.shape.resize(1, whole.shape[whole.token_dim] / sizes().split.ranks);
        return made;
    }

    // Lets the forward pass leave its result where the next part expects it: written there, or copied. If
    // input and output are one buffer, it is not written before the last read of the input.
    void finish_output(Draft& calls_of_pass, bool is_one_buffer = false) {
        if (part_.output < 0) return;
        const Ref made = value(part_.output);
        Storage& made_in = storage(made.storage);
        std::ptrdiff_t first_write = std::ssize(calls_of_pass), last_read = -1;
        for (std::ptrdiff_t i = 0; i < std::ssize(calls_of_pass); ++i) {
            for (const Operand& used : calls_of_pass[static_cast<std::size_t>(i)].operands) {
                if (!is_storage(used)) continue;
                if (used.index == made.storage) first_write = std::min(first_write, i);
                if (storage(used.index).home == Space::input) last_read = i;
            }
        }
        const bool is_late = !is_one_buffer || first_write > last_read;
        if (made_in.home == Space::scratch && !made.is_own_tokens && is_late) {
            made_in.home = Space::output;
            return;
        }
        const Ref to{make(part_.output, Space::output)};
        calls_of_pass.push_back(copy_call(part_.nodes.back(), operand(to, Access::write, part_.output),
                                          operand(made, Access::read, part_.output)));
    }

    // ---- for rows of the table of operations

    const Node& node() const { return *node_; }
    const PartSizes& sizes() const { return sizes_; }
    bool divides_tokens() const { return is_shared() && sizes_.split.sequence_parallel; }
    bool is_shared() const { return sizes_.split.ranks > 1; }

    // The node's inputs, outputs and parameters by position. The operand of an absent parameter is empty.
    Operand read(int input) { return operand(*values_[index(in(input))], Access::read, in(input)); }
    Operand output(int place, Access access = Access::write) {
        std::optional<Ref>& ref = values_[index(out(place))];
        if (ref && access == Access::write && !recomputes_)
            programming_error(
                fmt::format("{}: {} {} writes its output {} a second time; to read or change an output, "
                            "pass Access::read or Access::add",
                            part_.name, node().operation->name, node().name, place));
        if (!ref || (access == Access::write && !recomputes_)) ref = {make(out(place), Space::scratch)};
        return operand(*ref, access, out(place));
    }
    Operand parameter(int place) {
        const int number = node().parameters[index(place)];
        if (number < 0) return {};
        const ParamSpec& spec = part_.parameters[index(number)].spec;
        const Shape stored = stored_shape(spec, sizes().split.ranks);
        return {.kind = Operand::Kind::parameter,
                .index = number,
                .shape = spec.is_nf4      ? Shape{nf4_bytes(stored.elements())}
                         : spec.is_vector ? Shape{stored.elements()}
                                          : stored,
                .dtype = spec.is_nf4 ? DType::uint8 : sizes().dtype};
    }
    // Its shape on this rank; that of the operand has bytes, if it is in 4 bits.
    Shape shape_of_parameter(int place) const {
        return stored_shape(part_.parameters[index(node().parameters[index(place)])].spec,
                            sizes().split.ranks);
    }
    // Whether it has no gradient.
    bool is_frozen(int place) const {
        const int number = node().parameters[index(place)];
        return number >= 0 && part_.parameters[index(number)].spec.is_frozen;
    }
    // A parameter that only one rank adds, where each rank makes a partial sum.
    static Operand on_first_rank_only(Operand parameter) {
        parameter.on_first_rank_only = true;
        return parameter;
    }
    Operand tokens() const { return ids(Operand::Kind::tokens); }
    Operand targets() const { return ids(Operand::Kind::targets); }
    // The node's table of angles, which is filled before the first step.
    Operand angles() const {
        const RopeAngles& of = *node_->angles;
        return {.kind = Operand::Kind::angles, .shape = {of.positions, of.head_size / 2, 2}};
    }
    // Memory for this operation only.
    Operand local(std::string_view name, DType dtype, const Shape& shape) {
        auto found = std::ranges::find_if(
            storages, [&](const Storage& storage) { return storage.is_local(node_, name); });
        // The local memory of the losses is kept, because generation reads the logits there.
        if (found == storages.end())
            found = storages.insert(
                found, {.name = std::string(name),
                        .dtype = dtype,
                        .shape = shape,
                        .home = node().operation->is_forward_in_backward ? Space::kept : Space::scratch,
                        .local_of = node_,
                        .is_fixed = true});
        return {.kind = Operand::Kind::storage,
                .access = Access::write,
                .index = static_cast<int>(found - storages.begin()),
                .shape = shape,
                .dtype = dtype};
    }
    // The same, for as many rows as an operand of a product has.
    Operand local_like(std::string_view name, const Operand& of) { return local_like(name, of, of.dtype); }
    Operand local_like(std::string_view name, const Operand& of, DType dtype) {
        const Operand made = local(name, dtype, of.shape);
        storage(made.index).is_fixed = of.kind == Operand::Kind::parameter || storage(of.index).is_fixed;
        return made;
    }
    // For a product in 8 bits: the greatest magnitude by which an operand is scaled, or the greatest that this step has
    // seen.
    Operand amax(Fp8Operand of, bool is_recorded) {
        int product = 0;
        for (const Node* other = part_.nodes.data(); other != node_; ++other)
            product += other->operation->may_be_in_fp8 ? 1 : 0;
        return {.kind = Operand::Kind::amax,
                .access = is_recorded ? Access::add : Access::read,
                .index = 2 * (fp8_operands * product + static_cast<int>(of)) + (is_recorded ? 1 : 0),
                .shape = {1}};
    }
    // The value of which an input is GELU; empty if there is none.
    Operand pre_gelu(int input) {
        const int of = part_.value(in(input)).gelu_of;
        return of < 0 ? Operand{} : operand(*values_[index(of)], Access::read, of);
    }
    // The memory of the first input in training. In generation it is the cache of the keys and values of all
    // tokens of one sequence.
    Operand cache(const Shape& shape) {
        return {.kind = Operand::Kind::storage,
                .access = Access::write,
                .index = cache_,
                .shape = shape,
                .dtype = sizes().dtype};
    }
    void set_cache(int storage) { cache_ = storage; }

    // An output that shares memory with an input: unchanged, changed in place, or restricted to the rank's
    // own tokens.
    void alias(int output, int input) { values_[index(out(output))] = value(in(input)); }
    Operand in_place(int output, int input) {
        Ref ref = value(in(input));
        if (is_needed_later(ref)) {
            const Ref copied{make(out(output), Space::scratch)};
            call<Copy>({operand(copied, Access::write, out(output)), operand(ref, Access::read, in(input))});
            ref = copied;
        }
        const Operand changed = next_version(ref, out(output), Half::both);
        values_[index(out(output))] = ref;
        return changed;
    }
    Operand own_tokens(int output, int input) {
        Ref ref = value(in(input));
        if (is_needed_later(ref)) return this->output(output, Access::write);
        next_version(ref, in(input), Half::both);
        ref.is_own_tokens = true;
        values_[index(out(output))] = ref;
        return operand(ref, Access::write, out(output));
    }

    // The complete gradient of an output, to read, or to change in place.
    Operand gradient(int output) { return operand(whole_gradient(out(output)), Access::read, out(output)); }
    Operand changed_gradient(int output) {
        whole_gradient(out(output));
        return change(out(output));
    }
    // The same for an output that may have no users; it starts as zero if it has none.
    Operand added_gradient(int output) {
        begin_with_zero(out(output));
        return change(out(output));
    }
    // The gradient of an input, which the call writes, or (add_gradient) to which it adds. The call belongs to
    // the half of the backward pass that makes input gradients.
    Operand make_gradient(int input) { return make_gradient_of(in(input)); }
    // The same for a product: of the value of which the input is GELU, if there is one.
    Operand make_gradient_before_gelu(int input) {
        const int of = part_.value(in(input)).gelu_of;
        return make_gradient_of(of < 0 ? in(input) : of);
    }
    // For an operation that computes GELU. has_gradient: whether an operation other than a product made the
    // gradient of an output. make_own_gradient: the gradient of another output of this node, which the call
    // writes.
    bool has_gradient(int output) { return gradients_[index(out(output))].has_value(); }
    Operand make_own_gradient(int output) { return make_gradient_of(out(output)); }
    Operand add_gradient(int input) {
        begin_with_zero(in(input));
        return change(in(input));
    }
    // Takes the gradient of an output, or the rank's own tokens of it, as the gradient of an input.
    void pass_gradient(int input, int output) {
        std::optional<Ref>& ref = gradients_[index(in(input))];
        const Ref passed = whole_gradient(out(output));
        if (!ref) {
            ref = passed;
            return;
        }
        const Operand sum = change(in(input));
        call_add(sum, operand(passed, Access::read, out(output), Half::input));
    }
    Operand own_gradient(int input, int output) {
        Ref own = whole_gradient(out(output));
        next_version(own, out(output), Half::input);
        own.is_own_tokens = true;
        take_gradient(in(input), own);
        return operand(own, Access::write, in(input), Half::input);
    }
    Operand parameter_gradient(int place) {
        Operand made = parameter(place);
        if (made.kind == Operand::Kind::none || is_frozen(place)) return {};
        made.kind = Operand::Kind::parameter_gradient;
        made.access = Access::add;
        made.half = Half::weight;
        made.dtype = DType::fp32;
        // If each rank computes this tensor's whole gradient, but the unit's replicated gradients are summed
        // over the ranks later, only one rank may add its gradient.
        const PartParameter& parameter = part_.parameters[index(made.index)];
        const TensorSplit& split = sizes().split;
        made.on_first_rank_only = is_shared() && !parameter.spec.divided_dim(split.ranks) &&
                                  parameter.sums_of_unit(split) &&
                                  !partial_gradient(part_, made.index)(split);
        return made;
    }

    // Calls the operation O. `make`, which captures nothing, makes it from the operands.
    template <class O, class F>
    void call(F make, std::vector<Operand> operands) {
        if (const int wrong = used_otherwise(make, *node_, sizes().split.ranks, operands); wrong >= 0)
            programming_error(fmt::format("{}: {} {} passes operand {} of {} with another access than {} has",
                                          part_.name, node().operation->name, node().name, wrong, O::name,
                                          O::name));
        call(O::name, run_op<F>, std::move(operands));
    }
    // The same for an operation whose tensors are its first fields.
    template <class O>
    void call(std::vector<Operand> operands) {
        call<O>(InOrder<O>{}, std::move(operands));
    }
    // sum += addend
    void call_add(const Operand& sum, const Operand& addend) {
        call<Add>([](const Running&, const Tensor* t) { return Add{t[0], t[0], t[1]}; }, {sum, addend});
    }
    void call_zero(const Operand& operand) {
        call<Fill>([](const Running&, const Tensor* t) { return Fill{t[0], 0.0F}; }, {operand});
    }
    // A call of several operations, or of one at times.
    void call(std::string_view name, RunCall run, std::vector<Operand> operands) {
        calls.push_back({.node = node_, .name = name, .run = run, .operands = std::move(operands)});
        // Adds gradients of values that already have one.
        for (const auto& [value, made] : std::exchange(pending_, {})) {
            const Operand sum = change(value);
            call_add(sum, operand(made, Access::read, value, Half::input));
        }
    }
    // The same for an exchange between ranks. `bytes` is what each rank sends for all tokens of the batch.
    void exchange(std::string_view name, RunCall run, std::vector<Operand> operands, std::uint64_t bytes) {
        const std::size_t place = calls.size();
        call(name, run, std::move(operands));
        calls[place].bytes = bytes;
        calls[place].is_exchange = true;
    }

  private:
    Operand ids(Operand::Kind kind) const {
        return {.kind = kind, .shape = {sizes().batch, part_.tokens}, .dtype = DType::int32};
    }

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    int in(int place) const { return node().in[index(place)]; }
    int out(int place) const { return node().out[index(place)]; }

    const Ref& whole_gradient(int value) const {
        const std::optional<Ref>& ref = gradients_[index(value)];
        if (!ref)
            programming_error(fmt::format("{}: nothing uses {}, which {} {} makes", part_.name,
                                          part_.value(value).name, node().operation->name, node().name));
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
    void begin_with_zero(int value) {
        std::optional<Ref>& ref = gradients_[index(value)];
        if (ref) return;
        ref = {make_gradient_storage(value, Space::scratch)};
        call_zero(operand(*ref, Access::write, value, Half::input));
    }
    Operand make_gradient_of(int value) {
        const Ref made{make_gradient_storage(value, Space::scratch)};
        take_gradient(value, made);
        return operand(made, Access::write, value, Half::input);
    }
    // Changes a gradient in place. If another value's gradient shares the storage and is still needed, it
    // changes a copy. Still needed are the gradients of the part's input and of the outputs of this node and
    // of earlier nodes.
    Operand change(int value) {
        Ref& ref = *gradients_[index(value)];
        const auto is_needed = [&](int other) {
            return other != value && gradients_[index(other)] &&
                   gradients_[index(other)]->storage == ref.storage &&
                   (other == part_.input ||
                    std::ranges::any_of(std::span(part_.nodes.data(), node_ + 1), [&](const Node& node) {
                        return std::ranges::find(node.out, other) != node.out.end();
                    }));
        };
        for (int other = 0; other < std::ssize(part_.values); ++other) {
            if (!is_needed(other)) continue;
            const Ref copied{make_gradient_storage(value, Space::scratch)};
            call<Copy>({operand(copied, Access::write, value, Half::input),
                        operand(ref, Access::read, value, Half::input)});
            ref = copied;
            break;
        }
        return next_version(ref, value, Half::input);
    }
    // Whether a later operation, or the next part, reads what the storage holds now.
    bool is_needed_later(const Ref& ref) const {
        const auto is_here = [&](int value) {
            return values_[index(value)] && values_[index(value)]->storage == ref.storage;
        };
        const std::span later(node_ + 1, part_.nodes.data() + part_.nodes.size());
        return (part_.output >= 0 && is_here(part_.output)) ||
               std::ranges::any_of(later,
                                   [&](const Node& node) { return std::ranges::any_of(node.in, is_here); });
    }
    Operand next_version(Ref& ref, int value, Half half) {
        if (ref.version + 1 != storage(ref.storage).versions)
            programming_error(fmt::format("{}: {} {} changes {}, which has changed since", part_.name,
                                          node().operation->name, node().name, storage(ref.storage).name));
        const int before = std::exchange(ref.version, storage(ref.storage).versions++);
        Operand changed = operand(ref, Access::add, value, half);
        changed.read_version = before;
        return changed;
    }

    const Part& part_;
    PartSizes sizes_;
    const Node* node_ = nullptr;
    std::vector<std::optional<Ref>> values_, gradients_;
    std::vector<std::pair<int, Ref>> pending_;
    int cache_ = -1;
    bool recomputes_ = false;
};

}  // namespace llmc
